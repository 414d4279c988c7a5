"""The demo's workload: trainings, arrival times and batch scripts.

One TOML file describes the jobs. Both runs of `make compare` use it, so that they differ only in who chooses the GPUs
and the batch sizes: Pollux or the user.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


class WorkloadError(Exception):
    """The workload file is not usable; the message names the job and the key."""


@dataclass(frozen=True, slots=True)
class Training:
    """One training of the workload, with the stand-in for its accelerator.

    `alpha_s + beta_s * m` is the time of a forward and backward pass over m examples on one stand-in GPU, and
    `sync_local_s` / `sync_node_s` that of an all-reduce within a node / between nodes [s]: the terms of the
    paper's throughput model (section 3.2), slept by the example because the machine has no accelerator.
    """

    name: str
    script: str
    arrive_s: float
    epochs: float
    batch_size: int
    """M0 [examples]."""
    max_batch_size: int
    per_gpu: tuple[int, int]
    lr: float
    alpha_s: float
    beta_s: float
    sync_local_s: float
    sync_node_s: float
    min_gpus: int = 1
    max_gpus: int | None = None
    adaptive: bool = True
    lr_rule: str = "adascale"
    """How the learning rate grows with the batch size: by `adascale` (SGD), or its `square-root` (Adam)."""
    args: tuple[str, ...] = ()
    resize: str | None = None
    """`requeue`: its size changes by restarts through the queue alone."""
    minutes: int = 10
    """Its time limit (--time)."""

    def directive(self) -> str:
        words = [f"min-gpus={self.min_gpus}"]
        if self.max_gpus is not None:
            words.append(f"max-gpus={self.max_gpus}")
        if not self.adaptive:
            words.append("adaptive=no")
        if self.resize is not None:
            words.append(f"resize={self.resize}")
        return "#POLLUX " + " ".join(words)


@dataclass(frozen=True, slots=True)
class Size:
    """What a user of plain Slurm asks for.

    It is a fixed shape, with the batch size tuned for that shape.
    """

    nodes: int
    gpus_per_node: int
    batch_size: int
    epochs: float
    lr: float

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class Workload:
    nodes: int
    gpus_per_node: int
    limit_s: float
    """The run fails if a job has not ended by then [s]."""
    trainings: tuple[Training, ...] = field(default_factory=tuple)

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


def _alike(tables: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Fill in what a training that is `like` an earlier one does not say itself."""
    filled: list[dict[str, object]] = []
    for number, table in enumerate(tables, 1):
        own = dict(table)
        if (other := own.pop("like", None)) is not None:
            found = next((earlier for earlier in filled if earlier.get("name") == other), None)
            if found is None:
                raise WorkloadError(
                    f"[[training]] number {number}: like = {other!r}: expected an earlier training's name"
                )
            own = found | own
        filled.append(own)
    return filled


def _training(table: dict[str, object], number: int) -> Training:
    known = dict(table)
    for key in ("per_gpu", "args"):
        if key in known:
            known[key] = tuple(known[key])  # type: ignore[arg-type]
    try:
        return Training(**known)  # type: ignore[arg-type]
    except TypeError as error:
        # "Training.__init__() got an unexpected keyword argument 'x'", or which ones are missing.
        raise WorkloadError(
            f"[[training]] number {number} ({table.get('name', 'unnamed')}): {error}"
        ) from None


def load(path: Path) -> Workload:
    """Read a workload file.

    Raises:
        WorkloadError: a training is wrong; the message says which and how.
    """
    try:
        document = tomllib.loads(path.read_text())
        tables = _alike(document["training"])
        trainings = tuple(_training(t, i) for i, t in enumerate(tables, 1))
        cluster = document["cluster"]
        work = Workload(cluster["nodes"], cluster["gpus_per_node"], document["limit_s"], trainings)
    except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
        raise WorkloadError(f"{path}: {error}") from None
    names = [t.name for t in trainings]
    if len(set(names)) != len(names):
        raise WorkloadError(f"{path}: two trainings share a name: {sorted(names)}")
    return work


def _script_arguments(job: Training, result: Path, batch_size: int, epochs: float, lr: float) -> list[str]:
    return [
        *("--epochs", f"{epochs:g}"),
        *("--batch-size", str(batch_size)),
        *("--max-batch-size", str(max(job.max_batch_size, batch_size))),
        *("--per-gpu", str(job.per_gpu[0]), str(job.per_gpu[1])),
        *("--lr", f"{lr:g}"),
        *("--alpha", f"{job.alpha_s:g}"),
        *("--beta", f"{job.beta_s:g}"),
        *("--sync", f"{job.sync_local_s:g}", f"{job.sync_node_s:g}"),
        *("--result", str(result)),
        *job.args,
    ]


def batch_script(job: Training, *, root: Path, folder: Path, size: Size | None = None) -> str:
    """Return the batch script for sbatch.

    Without `size` it is a Pollux job. With `size` it is a plain Slurm job of that fixed size. `root` is the checkout;
    `folder` takes the job's log and result.
    """
    result = folder / f"{job.name}.result.json"
    if size is None:
        resources = ["--nodes=1", f"--gpus-per-node={job.min_gpus}"]
        arguments = _script_arguments(job, result, job.batch_size, job.epochs, job.lr)
    else:
        resources = [f"--nodes={size.nodes}", f"--gpus-per-node={size.gpus_per_node}"]
        arguments = _script_arguments(job, result, size.batch_size, size.epochs, size.lr)
    lines = ["#!/bin/bash", f"#SBATCH --job-name={job.name}"]
    lines += [
        f"#SBATCH {option}"
        for option in (*resources, "--ntasks-per-node=1", "--cpus-per-task=1", f"--time={job.minutes}")
    ]
    lines.append(f"#SBATCH --output={folder / (job.name + '.log')}")
    environment = []
    if size is None:
        lines.append(job.directive())
        # Not beside the checkout: a fresh cluster counts job ids from 1 and would find an older cluster's files.
        checkpoints = folder / "checkpoints" / job.name
        environment = [f"export POLLUX_CHECKPOINT_DIR={shlex.quote(str(checkpoints))}"]
    lines += [
        "",
        *environment,
        f"cd {shlex.quote(str(root))}",
        f"exec pollux run {job.script} {shlex.join(arguments)}",
        "",
    ]
    return "\n".join(lines)
