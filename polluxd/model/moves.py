"""Moves of jobs, and their steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from polluxd.model.nodes import NO_PLACEMENT, Placement


class Step(StrEnum):
    """Steps of a move, in order; each has its time in table `move`."""

    PLANNED = "planned"
    DRAINING = "draining"
    RECRUITING = "recruiting"
    """Growing in place: the agent is told to submit a companion job."""
    CHECKPOINTED = "checkpointed"
    REQUEUED = "requeued"
    CONFIGURED = "configured"
    STARTED = "started"
    TRAINING = "training"
    PARKED = "parked"
    """The end of path `park`: waiting without GPUs, kept back by a lease."""
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        return self in (Step.TRAINING, Step.PARKED, Step.FAILED)


RESTARTING_PATHS = frozenset({"requeue", "park"})
"""Those that end every process of a running job."""


_LAST_CHANCE = {
    "resize shrink": Step.DRAINING,
    "resize grow": Step.CONFIGURED,
    "start": Step.PLANNED,
}


@dataclass(frozen=True, slots=True)
class Move:
    """A move of one job, written before each action on Slurm.

    `attempt` is the restart count that the job had when the move was planned: with the job id it is the fence
    that keeps a move from being applied twice. `path` is `start` (first placement of a pending job), `requeue`
    (running job to another placement), `park` (running job to none) or `resize` (in place: the processes that stay
    live on). The nodes of a resize's target begin with the job's batch host, and are a subset of the source's (shrink)
    or a superset (grow). A database may hold finished moves of the path `relaunch`, which polluxd no longer takes.
    """

    id: int
    job_id: int
    attempt: int
    path: str
    source: Placement
    target: Placement
    reason: str
    step: Step
    times: Mapping[Step, float]
    """When each step was reached."""
    detail: str = ""
    cancelled_by: str = ""
    """Who took the move back (`polluxctl cancel-move`); obeyed until the job is requeued."""
    ends_at: float | None = None
    """When the attempt that drains uses up its user's time limit; None: unlimited, or no such attempt."""
    nonce: str = ""
    """Random text that only the job's own agent is told: a companion job proves by it that this move ordered it."""

    @property
    def in_allocation(self) -> bool:
        """The job is not requeued: its attempt goes on."""
        return self.path == "resize"

    @property
    def grows(self) -> bool:
        """In the allocation, by a companion job."""
        return self.in_allocation and len(self.target.nodes) > len(self.source.nodes)

    @property
    def added(self) -> Placement:
        """What a growing move's companion brings; none for other moves."""
        if not self.grows:
            return NO_PLACEMENT
        new = tuple(n for n in self.target.nodes if n not in self.source.nodes)
        return Placement(new, self.target.gpus_per_node)

    @property
    def revocable(self) -> bool:
        """Whether the move can still be taken back at its present step."""
        kind = f"resize {'grow' if self.grows else 'shrink'}" if self.in_allocation else self.path
        steps = list(Step)
        return steps.index(self.step) <= steps.index(_LAST_CHANCE.get(kind, Step.CHECKPOINTED))
