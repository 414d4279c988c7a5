"""What the ends of a job's moves mean for its next ones.

After a move polluxd leaves a job alone for a while (its cooldown). The cooldown depends on the cost of the move, so a
job that started within seconds may soon grow. A job without GPUs has no training to protect: it rests only after a
person has cancelled its move, and where starts fail one after another. What a refusal teaches is in `refusals`.

A job may refuse one drain, or leave it unanswered: its agent may have been unable to save. What it holds beyond its
user's equal share it then gives back at the second order all the same (`protected`), so that it costs nobody but its
own user. Such a job gains no GPUs beyond the equal share any more.

A restart of polluxd loses both; the loss costs one early retry, and the other users one more drain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from polluxd.apply.placed import part_of
from polluxd.model import Move, Step
from polluxd.slurm.protocol import ClusterState, SlurmJob


@dataclass(slots=True)
class _Past:
    """The ends of one job's moves."""

    rests_until: float = -math.inf
    """By a clock that does not step [s]."""
    cancelled: bool = False
    """A person has cancelled the newest move, or its start failed again: it rests without GPUs, too."""
    undrained: int = 0
    """Drains that the job's agent refused, or left unanswered."""
    least: float = math.inf
    """Fewest GPUs on which this process has seen it train after a move."""
    failed_on: int = 0
    """Most GPUs on which a move has started it, and it did not train."""


class PastMoves:
    """The ends of all jobs' moves.

    Args:
        cooldown: longest cooldown [s].
    """

    def __init__(self, cooldown: float, monotonic: Callable[[], float]) -> None:
        self._cooldown = cooldown
        self._monotonic = monotonic
        self._jobs: dict[int, _Past] = {}

    def cooldown(self, job_id: int) -> float:
        """Return the rest of the job's cooldown [s]."""
        past = self._jobs.get(job_id)
        return 0.0 if past is None else max(0.0, past.rests_until - self._monotonic())

    def undrained(self, job_id: int) -> int:
        """Return how many drains the job left undone."""
        return self._jobs[job_id].undrained if job_id in self._jobs else 0

    def unproven(self, moves: Iterable[Move], jobs: Mapping[int, SlurmJob]) -> set[int]:
        """Return the jobs that moves bring to a part of their place, on which nobody has seen their trainers work.

        A trainer that cannot work there says so after one failure. Another one keeps nobody off what it leaves again.
        """
        found = set()
        for move in moves:
            job = jobs.get(move.job_id)
            size = job.spec.own_size if job is not None and job.spec is not None else None
            if size is not None and move.path == "requeue" and part_of(move.target, move.source):
                past = self._jobs.get(move.job_id, _Past())
                known = past.failed_on < move.target.gpus < min(size, past.least)
                found |= {move.job_id} if known else set()
        return found

    def completed(self, move: Move, took: float) -> None:
        """Begin a cooldown, no longer than the move took [s]; none after a resize in place."""
        past = self._jobs.setdefault(move.job_id, _Past())
        past.cancelled = False
        past.least = min(past.least, move.target.gpus or math.inf)
        past.failed_on *= move.target.gpus > past.failed_on
        self._rest(past, 0.0 if move.path == "resize" else took)

    def failed(self, move: Move, *, rest: bool = True, undrained: bool = False, person: bool = False) -> None:
        """Begin a cooldown, with `rest`; a `person` has taken the job's move back."""
        past = self._jobs.setdefault(move.job_id, _Past())
        past.undrained += undrained
        if rest:
            past.cancelled = person or (move.step is Step.STARTED and past.failed_on > 0)
            self._rest(past)
        if move.step is Step.STARTED and not person:
            past.failed_on = max(past.failed_on, move.target.gpus)

    def _rest(self, past: _Past, most: float = math.inf) -> None:
        past.rests_until = self._monotonic() + min(self._cooldown, most)

    def keep(self, holding: Collection[int], waiting: Collection[int]) -> None:
        """Forget all jobs but these; of those that wait, the cooldowns that no cancelled move began."""
        self._jobs = {
            job_id: past
            if job_id in holding or past.cancelled
            else replace(_Past(), undrained=past.undrained, least=past.least, failed_on=past.failed_on)
            for job_id, past in self._jobs.items()
            if job_id in holding or job_id in waiting
        }


def equal_share(state: ClusterState) -> float | None:
    """Return the GPUs of the cluster over the users with Pollux jobs; None: there is at most one such user."""
    # By user: further jobs of one user take nothing from the share of the others.
    users = {job.uid for job in state.jobs if job.spec is not None and not job.state.finished}
    return sum(node.gpus for node in state.nodes) / len(users) if len(users) > 1 else None
