"""`pollux run` under a real Slurm.

After a resize, the ranks have the present sizes. USR1 is the script's own. A failure gives one exit status.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from polluxd.model import JobState
from tests.integration.slurm_jobs import SlurmJobs

pytestmark = pytest.mark.slurm

Submit = Callable[[str, str], int]

# Ranks talk over plain sockets of torch's store and print what they are.
SCRIPT = """
import os, signal, sys, time
if sys.argv[1] == "usr1":
    signal.signal(signal.SIGUSR1, lambda *_: (print("usr1", os.environ["RANK"], flush=True), os._exit(0)))
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"]),
                      os.environ["RANK"] == "0", timeout=timedelta(seconds=90))
size = int(os.environ["WORLD_SIZE"])
store.add("here", 1)
while store.add("here", 0) < size:
    time.sleep(0.05)
names = ("RANK", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")
print("world", size, *(os.environ.get(name) for name in names), flush=True)
if sys.argv[1] == "fail" and os.environ["RANK"] == sys.argv[2]:
    raise SystemExit(7)
# Without the other ranks' counting itself out, the store would end with rank 0 under their feet.
time.sleep(float(sys.argv[-1]))
store.add("done", 1)
while os.environ["RANK"] == "0" and store.add("done", 0) < size:
    time.sleep(0.05)
"""


@pytest.fixture
def submit(jobs: SlurmJobs) -> Submit:
    """Submit a job that runs a command beside train.py."""
    (jobs.folder / "train.py").write_text(SCRIPT)

    def made(options: str, command: str) -> int:
        lines = ("#!/bin/bash", f"#SBATCH {options}", f"cd {jobs.folder}", command, "echo script status $?\n")
        return jobs.submit("\n".join(lines), "--open-mode=append")

    return made


def over(text: str) -> bool:
    return "script status" in text


def ranks(text: str) -> list[tuple[int, int, str, str]]:
    found = re.findall(r"^world (\d+) (\d+) (\w+) (\w+)", text, re.MULTILINE)
    return sorted((int(world), int(rank), node, gpu) for world, rank, node, gpu in found)


def test_after_a_resize_by_requeue_the_sizes_are_those_of_now(jobs: SlurmJobs, submit: Submit) -> None:
    job = submit("--nodes=1 --gpus-per-node=1 --ntasks-per-node=1", "pollux run train.py ok 90")
    jobs.until_output(job, lambda text: len(ranks(text)) == 1)
    jobs.cluster.command("scontrol", "requeue", "incomplete", str(job))
    jobs.wait(job, JobState.PENDING)
    time.sleep(1.1)  # a start in the same second as the end reuses a revoked credential
    sizes = "NumNodes=2-2 NumTasks=2 NumCPUs=2 CPUsPerTask=1 TasksPerNode=1 TresPerJob= TresPerTask="
    place = "TresPerNode=gres:gpu:2 ReqNodeList=n2,n3 StartTime=now"
    jobs.cluster.command("scontrol", "update", f"jobid={job}", *sizes.split(), *place.split())
    text = jobs.until_output(job, lambda text: len(ranks(text)) == 5)
    assert ranks(text)[1:] == [(4, 0, "n2", "0"), (4, 1, "n2", "1"), (4, 2, "n3", "0"), (4, 3, "n3", "1")]


def test_usr1_reaches_the_script_s_own_handlers_and_ends_no_launcher(jobs: SlurmJobs, submit: Submit) -> None:
    job = submit("--nodes=2 --gpus-per-node=2 --ntasks-per-node=1", "pollux run train.py usr1 90")
    jobs.until_output(job, lambda text: len(ranks(text)) == 4)
    jobs.cluster.command("scancel", "-s", "USR1", str(job))
    text = jobs.until_output(job, over)
    assert "script status 0" in text
    assert sorted(re.findall(r"^usr1 (\d)$", text, re.MULTILINE)) == ["0", "1", "2", "3"]


def test_the_first_failure_ends_the_step_with_its_status(jobs: SlurmJobs, submit: Submit) -> None:
    # Launchers that srun starts share no secret by themselves: this is no Pollux job.
    key = "POLLUX_LAUNCH_KEY=$(head -c 32 /dev/urandom | sha256sum)"
    srun = f"{key} srun --ntasks-per-node=1 pollux run train.py fail 3 80"
    job = submit("--nodes=2 --gpus-per-node=2 --ntasks-per-node=1", srun)
    text = jobs.until_output(job, over)
    assert "script status 7" in text
    # Which two nodes Slurm gives is its own affair: another test's job may still be completing on n1.
    node = next(node for _, rank, node, _ in ranks(text) if rank == 3)
    assert re.search(rf"rank 3 \(pid \d+, {node}\) failed first: sys\.exit\(7\)", text)


def test_several_tasks_per_node_are_refused_with_advice(jobs: SlurmJobs, submit: Submit) -> None:
    job = submit("--nodes=1 --gpus-per-node=2 --ntasks-per-node=2", "srun pollux run train.py ok 1")
    text = jobs.until_output(job, over)
    assert "script status 2" in text
    assert "expected one `pollux run` per node, but srun started 2 tasks on 1 node(s)" in text
