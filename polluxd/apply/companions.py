"""Companion jobs: worker-only jobs that lend whole nodes to a running job.

Slurm sees two jobs; users see one.

The companion itself says which job is its parent, so polluxd checks this claim. It accepts a companion only if the
parent belongs to the same user and account, runs at the attempt that the companion names, and has the move that the
companion names. The companion must also know the nonce of the move, which polluxd gives only to the agent of the
parent. So nobody can make a companion by guessing a move id or by forging a user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from polluxd.apply.placed import same_place
from polluxd.model import JobState, Move, Step
from polluxd.slurm.protocol import ClusterState, SlurmJob

_HOLDS = (JobState.RUNNING, JobState.SUSPENDED)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster with each companion assigned to its parent."""

    state: ClusterState
    """`state.jobs` has no companions; a job with companions also holds its companions' nodes and GPUs."""
    pending_companions: Mapping[int, SlurmJob]
    """Companions of open moves, by the id of the move."""
    orphans: tuple[SlurmJob, ...]
    """Companions that have not ended and belong to no job. Their parent has gone, belongs to another user, or did not
    ask for them; or the companions are about to end."""
    moves: Mapping[int, Move]
    """Moves within allocations: moves that companions name, and moves of present attempts that failed once begun."""


def named_moves(state: ClusterState) -> list[int]:
    """Return the ids of the moves that companions name."""
    return sorted({job.companion.move for job in state.jobs if job.companion is not None})


def gather(state: ClusterState, moves: Mapping[int, Move]) -> ClusterView:
    """Assign the companions of `state` to their parents; `moves`: at least those of `named_moves`, by id."""
    jobs = {job.job_id: job for job in state.jobs if job.companion is None}
    joined: dict[int, list[SlurmJob]] = {}
    pending_companions: dict[int, SlurmJob] = {}
    orphans: list[SlurmJob] = []
    for job in sorted(state.jobs, key=lambda j: j.job_id):
        if job.companion is None or job.state.finished:
            continue
        move = moves.get(job.companion.move)
        if move is None or not _genuine(job, jobs.get(job.companion.parent), move):
            orphans.append(job)
        elif not move.step.terminal and move.id not in pending_companions:
            pending_companions[move.id] = job
        elif move.step is Step.TRAINING and job.state in _HOLDS and same_place(job, move.added):
            joined.setdefault(job.companion.parent, []).append(job)
        else:
            orphans.append(job)
    merged = tuple(_together(job, joined.get(job.job_id, ())) for job in jobs.values())
    return ClusterView(replace(state, jobs=merged), pending_companions, tuple(orphans), moves)


def _genuine(companion: SlurmJob, parent: SlurmJob | None, move: Move) -> bool:
    claim = companion.companion
    assert claim is not None
    return (
        parent is not None
        and parent.spec is not None
        and (parent.uid, parent.account) == (companion.uid, companion.account)
        and parent.state in _HOLDS
        and parent.restart_count == claim.attempt
        and (move.job_id, move.attempt, move.grows) == (parent.job_id, claim.attempt, True)
        and move.nonce == claim.nonce
    )


def _together(job: SlurmJob, companions: list[SlurmJob] | tuple[()]) -> SlurmJob:
    if not companions:
        return job
    gpus, cpus = dict(job.gpus_per_node_held), dict(job.cpus_per_node_held)
    for companion in companions:
        gpus.update(companion.gpus_per_node_held)
        cpus.update(companion.cpus_per_node_held)
    return replace(
        job,
        nodes=tuple(sorted({*job.nodes, *gpus})),
        gpus_per_node_held=gpus,
        cpus_per_node_held=cpus,
        companions=tuple(companions),
    )
