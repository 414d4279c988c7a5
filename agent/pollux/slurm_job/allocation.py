"""Read a launcher's nodes, node rank and GPUs from the environment.

A job that polluxd has resized keeps stale variables from its submission (SLURM_NTASKS, SLURM_GPUS,
SLURM_CPUS_PER_TASK, ...), and srun takes them for options. This module reads only variables that Slurm writes at each
start; `environment_of_srun` drops the others before srun is called.

Sources: srun(1) and sbatch(1), "INPUT ENVIRONMENT VARIABLES" and "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pollux.errors import LaunchError
from pollux.slurm_job.access import in_pollux_job
from pollux.slurm_job.slurm_commands import answer, for_srun

# Sizes that srun reads as options; they are the submission's, and not the job's present ones. With --export=NONE, srun
# would withhold the batch script's variables from its tasks.
STALE = frozenset(
    {
        "SLURM_EXPORT_ENV",
        "SRUN_EXPORT_ENV",
        "SLURM_NTASKS",
        "SLURM_NPROCS",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_NTASKS_PER_CORE",
        "SLURM_NTASKS_PER_SOCKET",
        "SLURM_NTASKS_PER_GPU",
        "SLURM_NTASKS_PER_TRES",
        "SLURM_TASKS_PER_NODE",
        "SLURM_NNODES",
        "SLURM_CPUS_PER_TASK",
        "SLURM_CPUS_PER_GPU",
        "SLURM_GPUS",
        "SLURM_GPUS_PER_NODE",
        "SLURM_GPUS_PER_TASK",
        "SLURM_GPUS_PER_SOCKET",
        "SLURM_GRES",
        "SLURM_TRES_PER_TASK",
        "SLURM_MEM_PER_CPU",
        "SLURM_MEM_PER_GPU",
        "SLURM_MEM_PER_NODE",
        "SLURM_THREADS_PER_CORE",
        "SLURM_DISTRIBUTION",
        "SLURM_REQ_SWITCH",
        "SLURM_CORE_SPEC",
        "SLURM_EXACT",
        "SLURM_OVERLAP",
    }
)
# Variables of another launcher around this one.
FOREIGN_RANKS = frozenset(
    ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]
)

INTERACTIVE_STEP = str(0xFFFFFFFA)
"""SLURM_INTERACTIVE_STEP of slurm.h."""

FIRST_PORT, PORTS = 20_000, 12_000
"""Below Linux's ephemeral ports (32768), so that no outgoing connection takes one by chance."""


@dataclass(frozen=True, slots=True)
class StepAllocation:
    """One launcher's share of the job."""

    node_rank: int = 0
    num_nodes: int = 1
    workers: int = 1
    """One per GPU of this node."""
    gpu_ids: tuple[str, ...] = ()
    """Values that CUDA_VISIBLE_DEVICES may name here; empty on CPU."""
    first_node: str = ""
    """Slurm's name of the node with rank 0; empty outside Slurm."""
    job_id: int | None = None
    attempt: int = 0
    step_id: str = ""

    @property
    def identity(self) -> str:
        """Name this step of this attempt; equal on all its nodes."""
        return f"{self.job_id}.{self.attempt}.{self.step_id}"


def in_batch_script(env: Mapping[str, str]) -> bool:
    """Tell whether this is a batch script or a shell of salloc, not a task of srun.

    With use_interactive_step, salloc's shell is the task of a step that holds one node of the allocation.
    """
    return "SLURM_JOB_ID" in env and env.get("SLURM_STEP_ID", INTERACTIVE_STEP) == INTERACTIVE_STEP


def environment_of_srun(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without options to srun, stale sizes and foreign ranks."""
    return {name: value for name, value in for_srun(env).items() if name not in FOREIGN_RANKS}


def read_allocation(env: Mapping[str, str], *, workers: int | None = None) -> StepAllocation:
    """Read this launcher's share inside an srun task.

    `workers` overrides the number of workers of each node. Raises LaunchError if the step has more than one task on
    this node, since each task would start a worker on every GPU.
    """
    try:
        local_id, node_rank = int(env.get("SLURM_LOCALID", "0")), int(env.get("SLURM_NODEID", "0"))
        num_nodes = int(env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_JOB_NUM_NODES") or "1")
        job_id, attempt = int(env["SLURM_JOB_ID"]), int(env.get("SLURM_RESTART_COUNT") or 0)
        tasks = int(env.get("SLURM_STEP_NUM_TASKS") or num_nodes)
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"expected the environment of an srun task, found a variable missing or garbled: {error}"
        ) from error
    if local_id or tasks != num_nodes:
        raise LaunchError(
            f"expected one `pollux run` per node, but srun started {tasks} tasks on {num_nodes} node(s); use "
            "`srun --ntasks-per-node=1 pollux run ...`, or call `pollux run` in the batch script without srun"
        )
    gpu_ids = visible_gpus(env)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    return StepAllocation(
        node_rank=node_rank,
        num_nodes=num_nodes,
        workers=workers or len(gpu_ids) or 1,
        gpu_ids=gpu_ids,
        first_node=first_host(nodes),
        job_id=job_id,
        attempt=attempt,
        step_id=env.get("SLURM_STEP_ID", ""),
    )


def visible_gpus(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that this process may use, as CUDA names them.

    CUDA obeys CUDA_VISIBLE_DEVICES, which counts from 0 under a cgroup that confines devices. SLURM_STEP_GPUS and
    SLURM_JOB_GPUS hold the node's own indices, so they only give the count.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(
            part for part in (p.strip() for p in visible.split(",")) if part and part != "NoDevFiles"
        )
    listed = env.get("SLURM_STEP_GPUS") or env.get("SLURM_JOB_GPUS") or ""
    count = len(expand_indices(listed)) or _number(env.get("SLURM_GPUS_ON_NODE", ""))
    return tuple(str(index) for index in range(count))


def machine_gpus(devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Return all GPUs of this machine or container, without calling CUDA."""
    found = sum(1 for entry in devices.iterdir() if re.fullmatch(r"nvidia\d+", entry.name))
    return tuple(str(index) for index in range(found))


def expand_indices(text: str) -> list[int]:
    """Expand Slurm's index list: "0-2,5" -> [0, 1, 2, 5]."""
    indices: list[int] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        first, _, last = part.partition("-")
        try:
            indices += range(int(first), int(last or first) + 1)
        except ValueError as error:
            raise LaunchError(f"expected GPU indices like 0-2,5 from Slurm, found {text!r}") from error
    return indices


def fewest_cpus(text: str) -> int:
    """Smallest entry of SLURM_JOB_CPUS_PER_NODE: "8(x2),4" -> 4; 0 if none."""
    counts = [int(part) for part in re.findall(r"(?:^|,)(\d+)", text)]
    return min(counts, default=0)


def first_host(nodelist: str) -> str:
    """First name of a Slurm node list: "gpu[03-05,9],login" -> "gpu03"."""
    match = re.match(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*", nodelist)
    name = match.group(0) if match else nodelist
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", name)


def node_name(env: Mapping[str, str] = os.environ) -> str:
    """Return Slurm's name of this node, which its address and its host's name need not resemble.

    Outside of Slurm, return the machine's name.
    """
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def node_address(node: str) -> str:
    """Return a node's NodeAddr, since a Slurm node's name need not resolve.

    Returns the name if scontrol does not answer; connecting then shows whether it resolves.
    """
    shown = _shown("node", node)
    if shown is None:
        return node
    found = re.search(r"\bNodeAddr=(\S+)", shown)
    return found.group(1) if found else node


def nodes_now(env: Mapping[str, str]) -> int:
    """Return the present number of nodes of this batch script's job.

    A batch script's SLURM_JOB_NUM_NODES is that of its start, and a Pollux job may have shrunk since then: this asks
    Slurm. If scontrol does not answer, the variable counts.
    """
    known = _number(env.get("SLURM_JOB_NUM_NODES", "")) or 1
    if known == 1 or not in_pollux_job(env):
        return known
    shown = show_job(env.get("SLURM_JOB_ID", ""))
    if shown is None:
        return known
    found = re.search(r"\bNumNodes=(\d+)", shown)
    # A job never grows while its batch script runs.
    return min(int(found.group(1)) or known, known) if found else known


def show_job(job_id: str) -> str | None:
    """Return `scontrol show job` as one line; None without an answer.

    The last task of an array has the array's id, by which Slurm shows all tasks.
    """
    lines = (_shown("job", job_id) or "").splitlines()
    return next((line for line in lines if line.startswith(f"JobId={job_id} ")), None)


def task_of(environ: Mapping[str, str]) -> str:
    """Name this job as squeue does, `ARRAY_TASK` or `JOB`: the same in each of its attempts. Empty outside Slurm."""
    array, number = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{number}" if array and number else environ.get("SLURM_JOB_ID", "")


def munge_socket() -> Path | None:
    """Return the socket that AuthInfo of slurm.conf names. None: munge's own, or scontrol does not answer."""
    found = re.search(r"^AuthInfo\s+= .*?socket=([^,\s]+)", _shown("config") or "", re.MULTILINE)
    return Path(found.group(1)) if found else None


def gpu_type_of(node: str) -> str:
    """Return Slurm's name for the type of a node's GPUs. Empty where they have no type, or several."""
    found = re.search(r"\bGres=(\S+)", _shown("node", node) or "")
    # "gpu:a100:2(S:0-1)"; GPUs without a type are "gpu:2".
    kinds = set(re.findall(r"(?:^|,)gpu:([^:(,]+):", found.group(1))) if found else set()
    return kinds.pop()[:64] if len(kinds) == 1 else ""


def _shown(what: Literal["job", "node", "config"], name: str = "") -> str | None:
    return answer("scontrol", "show", what, *(["-o", name] if name else []))


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
