"""Read a job's placement from Slurm, and compute its next request."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from polluxd.model import Move, Placement, Step
from polluxd.slurm.protocol import Geometry, SlurmJob


def held(job: SlurmJob) -> Placement | None:
    """Return the placement that Slurm shows; None where the GPUs per node are uneven."""
    if not job.gpus_per_node_held:
        return Placement()
    counts = set(job.gpus_per_node_held.values())
    if len(counts) != 1:
        return None
    return Placement(tuple(sorted(job.gpus_per_node_held)), counts.pop())


def same_place(job: SlurmJob, target: Placement) -> bool:
    """Tell whether the job holds exactly `target`, in any order of nodes."""
    return job.gpus_per_node_held == dict.fromkeys(target.nodes, target.gpus_per_node)


def part_of(one: Placement, other: Placement) -> bool:
    """Tell whether a job on `other` that moves to `one` takes no further GPU."""
    return set(one.nodes) <= set(other.nodes) and one.gpus_per_node <= other.gpus_per_node


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


OVERRUN_S = 120.0
"""A job that still runs so long after its time limit is one that OverTimeLimit of slurm.conf lets run on."""


def ends_at(job: SlurmJob | None) -> float | None:
    """Return when Slurm will end the running attempt [POSIX s]; None without a time limit or an attempt."""
    if job is None or job.start_time is None or job.time_limit_s is None:
        return None
    return job.start_time + job.time_limit_s


def limit_reached_at(job: SlurmJob, moves: Sequence[Move]) -> float | None:
    """Return when the job has used up its user's time limit [POSIX s].

    Slurm's limits are whole minutes: after a move Slurm grants up to a minute more than was left. The next move takes
    these seconds off again, so that they do not add up. Returns None where `ends_at` does.

    Args:
        moves: the moves of the job, oldest first.
    """
    end = ends_at(job)
    for move in reversed(moves):
        requeued_at = move.times.get(Step.REQUEUED, 0.0)
        # A job of an earlier life of this id has left moves, too.
        if move.ends_at is None or move.attempt >= job.restart_count or requeued_at < job.submit_time:
            continue
        left = move.ends_at - requeued_at
        return None if end is None else end - (_granted(left) - left)
    return end


def _granted(left: float) -> float:
    """The time limit for `left` seconds: whole minutes, at least one."""
    return 60.0 * max(1, ceil(left / 60.0))


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
    left = _granted(move.ends_at - requeued_at)
    return left if left < job.time_limit_s else None


def no_larger(one: Placement, other: Placement) -> bool:
    """Whether a limit that refuses `one` refuses `other`, too, whatever it counts."""
    fewer = one.gpus <= other.gpus and len(one.nodes) <= len(other.nodes)
    return fewer and one.gpus_per_node <= other.gpus_per_node
