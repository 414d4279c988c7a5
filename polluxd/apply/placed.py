"""Read a job's placement from Slurm, and compute its next request."""

from __future__ import annotations

from math import ceil

from polluxd.model import Move, Placement, Step
from polluxd.slurm.protocol import Geometry, SlurmJob


def held(job: SlurmJob) -> Placement | None:
    """Return the placement that Slurm shows.

    Returns None where the GPUs per node are uneven.
    """
    if not job.gpus_per_node_held:
        return Placement()
    counts = set(job.gpus_per_node_held.values())
    if len(counts) != 1:
        return None
    return Placement(tuple(sorted(job.gpus_per_node_held)), counts.pop())


def same_place(job: SlurmJob, target: Placement) -> bool:
    """Tell whether the job holds exactly `target`, in any order of nodes."""
    return job.gpus_per_node_held == dict.fromkeys(target.nodes, target.gpus_per_node)


def geometry(job: SlurmJob, target: Placement, gpu_type: str = "", *, anywhere: bool = False) -> Geometry:
    """Return the resources that the job requests at `target`.

    CPUs and memory are scaled with the GPUs, because Slurm itself does not scale them. A job that was submitted for
    certain types of GPU asks for `gpu_type`, the type at `target`. With `anywhere`, Slurm chooses the nodes.
    """
    assert job.spec is not None
    gpus = target.gpus_per_node
    memory = job.spec.mem_per_gpu_mb
    return Geometry(
        nodes=target.nodes,
        gpus_per_node=gpus,
        cpus_per_task=job.spec.cpus_per_gpu * gpus,
        mem_per_node_mb=memory * gpus if memory else None,
        gpu_type=gpu_type if job.demands.gpu_types else "",
        min_cpus=job.demands.min_cpus,
        anywhere=anywhere,
    )


def ends_at(job: SlurmJob | None) -> float | None:
    """Return when Slurm will end the running attempt [POSIX s].

    Returns None where the job has no time limit or does not run.
    """
    if job is None or job.start_time is None or job.time_limit_s is None:
        return None
    return job.start_time + job.time_limit_s


def time_left(move: Move, job: SlurmJob) -> float | None:
    """Return the next attempt's time limit [s, whole minutes].

    The limit is the time that the job had left at its requeue, at least one minute. Returns None where the present
    limit stays: the time left is not known, the job asks for no more than that now, or it goes on after its time limit
    (`continue=yes`). Each attempt of such a job has the whole limit, because a shorter limit would never grow again.
    """
    if job.spec is not None and job.spec.continues:
        return None
    requeued_at = move.times.get(Step.REQUEUED)
    if move.ends_at is None or requeued_at is None or job.time_limit_s is None:
        return None
    left = 60.0 * max(1, ceil((move.ends_at - requeued_at) / 60.0))
    return left if left < job.time_limit_s else None
