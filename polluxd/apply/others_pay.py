"""Bound what a job that takes no GPUs costs others.

A plan may shrink or move jobs of other users so that one job can grow. If that job then does not take the GPUs, their
training stood for nothing. This happens to a job whose agent refuses, or whose starts fail. So the training time that
other users' jobs lose through moves for one job that came to nothing is counted, unless one of them did not give way.
Past 1 % of the time that these jobs have been there, polluxd lets the job grow no more. A restart of polluxd forgets
the count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from polluxd.apply.headroom import Headroom
from polluxd.model import RESTARTING_PATHS, Move
from polluxd.slurm.protocol import ClusterState

SHARE = 0.01
"""Of the time of the jobs that lose."""


@dataclass(slots=True)
class _PaidGrowth:
    """A move by which a job grows, and the moves of other users' jobs that make room for it."""

    job_id: int
    losers: dict[int, int]
    """Their jobs, by the id of their move."""
    costs: dict[int, float] = field(default_factory=dict)
    """Seconds without training, by the id of their move, once it has ended."""
    failed: bool = False
    kept: bool = False
    """One of the losers kept its GPUs: the job could not take them."""


class OthersPay:
    """What moves for one job have cost other users' jobs.

    Args:
        further: told of the end of each move, too.
    """

    def __init__(
        self, further: Callable[[Move, str, float], None] = lambda move, result, seconds: None
    ) -> None:
        self._further = further
        self._growths: dict[int, _PaidGrowth] = {}
        """By the id of the move."""
        self._lost: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        """By the job that did not grow: seconds lost by each other job."""

    def begun(self, moves: Sequence[Move], users: Mapping[int, str]) -> None:
        """Take in the moves of one decision; `users`: of all jobs."""
        for grows in moves:
            taken = set(grows.target.nodes)
            losers = {
                move.id: move.job_id
                for move in moves
                if users.get(move.job_id) != users.get(grows.job_id)
                and move.path in RESTARTING_PATHS
                and not taken.isdisjoint(move.source.nodes)
            }
            if losers and grows.target.gpus > grows.source.gpus:
                self._growths[grows.id] = _PaidGrowth(grows.job_id, losers)

    def ended(self, move: Move, result: str, seconds: float) -> None:
        """Take in the end of a move: `completed`, `failed` or `withdrawn`, so many seconds after it was planned."""
        self._further(move, result, seconds)
        for number, growth in list(self._growths.items()):
            if move.id in growth.losers:
                growth.costs[move.id] = seconds
                growth.kept |= result != "completed"
            elif move.id == number:
                if result == "completed":
                    del self._growths[number]
                    continue
                growth.failed = True
            if growth.failed and growth.costs.keys() == growth.losers.keys():
                for loser, job_id in growth.losers.items() if not growth.kept else ():
                    self._lost[growth.job_id][job_id] += growth.costs[loser]
                del self._growths[number]

    def lowered(self, allowed: Headroom, state: ClusterState) -> Headroom:
        """Return the headroom in which jobs that have cost others too much keep what they hold, or get their least."""
        jobs = {job.job_id: job for job in state.jobs if job.spec is not None and not job.state.finished}
        for job_id in self._lost.keys() - jobs.keys():
            del self._lost[job_id]
        most = dict(allowed.most)
        for job_id, lost in self._lost.items():
            age = sum(state.taken_at - jobs[other].submit_time for other in lost if other in jobs)
            seconds, job = sum(lost.values()), jobs[job_id]
            if seconds > SHARE * age and job.spec is not None:
                least = max(job.spec.min_gpus, job.spec.own_size or 0)
                holds = max(sum(job.gpus_per_node_held.values()), least)
                rule = f"1 % of others' time: moves for this job came to nothing and cost them {seconds:.0f} s; that"
                most[job_id] = min(most.get(job_id, (holds, rule)), (holds, rule))
        return replace(allowed, most=most) if self._lost else allowed
