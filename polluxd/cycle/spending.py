"""Count what rented nodes cost and gain, by the states in which Slurm shows them.

A node costs its price from the moment at which it is seen to boot until it is seen to be off. The jobs on it share the
cost by the GPUs that they hold there, whoever decided to rent it. Those that were last on it also bear its return
(`cloud_return_s`), and so does a job that polluxd gave the node and nobody saw there: a user whose jobs end as soon as
their nodes boot does not spend the money of nobody. What no job is on for longer is nobody's.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from polluxd.config.settings import PolicySettings
from polluxd.model import Move
from polluxd.policy.cloud.prices import price_of
from polluxd.slurm.protocol import ClusterState, SlurmJob

LONGEST_GAP_S = 3600.0
"""polluxd counts the time for which it was away, for nodes that are on when it returns: up to an hour."""
_AMOUNTS = ("node_seconds", "gpu_seconds", "cost", "saved_seconds")

_Payer = tuple[str, str, int]
"""Account, user, job."""
_Share = tuple[str, str, str, int]
"""Type of the node, account, user, job."""


class _On(NamedTuple):
    """A rented node that is on."""

    used_at: float
    """POSIX time at which a job was last seen on it."""
    parts: Mapping[_Payer, float]
    """Of the node, by who has it or had it last."""


class Spending:
    """The costs since they were last written."""

    def __init__(self) -> None:
        self.at = 0.0
        """POSIX time of the last look; 0: none."""
        self.sooner: Mapping[int, float] = {}
        """`Plan.sooner` of the last decision."""
        self._written_at = 0.0
        self._on: dict[str, _On] = {}
        self._given: dict[str, _Payer] = {}
        """By node that was not seen on since: the job that polluxd gave it last."""
        self._present: Mapping[_Share, list[float]] = {}
        """`_AMOUNTS` per second of each share at the last look."""
        self._counted: dict[_Share, list[float]] = defaultdict(_nothing)

    def observe(self, state: ClusterState, settings: PolicySettings) -> None:
        """Count the time since the last look, with the nodes that were on then."""
        if self.at:
            self._count(max(state.taken_at - self.at, 0.0))
        self.at, self._present = state.taken_at, self._rates(state, settings)

    def give(self, moves: Iterable[Move], jobs: Iterable[SlurmJob]) -> None:
        """Take in moves that begin: their jobs may end before anybody sees them on the nodes that boot for them."""
        payers = {job.job_id: _payer(job) for job in jobs}
        self._given |= {name: payers[move.job_id] for move in moves for name in move.target.nodes}

    def rows(self, counted_at: float | None) -> list[dict[str, Any]]:
        """Return what is to be added to the database, whose costs reach up to `counted_at`."""
        if counted_at is not None and self._written_at < counted_at - 1.0:
            # This process has just begun to count, or another one has counted in the meantime.
            self._counted.clear()
            gap = self.at - counted_at
            self._count(gap if 0.0 < gap <= LONGEST_GAP_S else 0.0)
        day = time.strftime("%Y-%m-%d", time.gmtime(self.at))
        names = ("type", "account", "user_name", "job_id")
        # A row without cost says that up to now there was none.
        found: dict[_Share, list[float]] = {("", "", "", 0): _nothing(), **self._counted}
        return [
            {"day": day, **dict(zip(names, share, strict=True)), **dict(zip(_AMOUNTS, amounts, strict=True))}
            for share, amounts in sorted(found.items())
        ]

    def written(self) -> None:
        """Begin again: the rows are in the database."""
        self._counted.clear()
        self._written_at = self.at

    def _count(self, seconds: float) -> None:
        for share, rates in self._present.items():
            for place, rate in enumerate(rates):
                self._counted[share][place] += rate * seconds

    def _rates(self, state: ClusterState, settings: PolicySettings) -> dict[_Share, list[float]]:
        found: dict[_Share, list[float]] = defaultdict(_nothing)
        if not settings.cloud_prices:
            return found
        jobs = [job for job in state.jobs if not job.state.finished]
        on: dict[str, list[tuple[SlurmJob, int]]] = {}
        for job in jobs:
            for name in {*job.nodes, *job.gpus_per_node_held}:
                on.setdefault(name, []).append((job, job.gpus_per_node_held.get(name, 0)))
        types: dict[int, str] = {}
        former, self._on = self._on, {}
        for node in state.nodes:
            kind, price = price_of(node, settings)
            known = former.get(node.name)
            if not kind or node.power == "off":
                continue
            here, given = on.get(node.name, []), self._given.pop(node.name, None)
            returns = known is not None and state.taken_at - known.used_at < settings.cloud_return_s
            parts: Mapping[_Payer, float] = {given: 1.0} if given and not here else _parts(here)
            used_at = state.taken_at
            if not (here or given) and known is not None and returns:
                parts, used_at = known.parts, known.used_at
            self._on[node.name] = _On(used_at, parts)
            for payer, part in parts.items():
                _add(found[kind, *payer], part, 0.0, part * price / 3600.0)
            for job, held in here:
                types[job.job_id] = kind
                _add(found[kind, *_payer(job)], 0.0, held)
        for job in jobs:
            if job.job_id in self.sooner:
                share = types.get(job.job_id, ""), *_payer(job)
                _add(found[share], 0.0, 0.0, 0.0, self.sooner[job.job_id])
        return found


def _parts(here: Sequence[tuple[SlurmJob, int]]) -> dict[_Payer, float]:
    """Return the parts of a node by payer."""
    gpus = sum(held for _, held in here)
    return {_payer(job): held / gpus if gpus else 1.0 / len(here) for job, held in here} or {_NOBODY: 1.0}


_NOBODY: _Payer = ("", "", 0)


def _payer(job: SlurmJob) -> _Payer:
    return job.account, job.user, job.job_id


def _nothing() -> list[float]:
    return [0.0] * len(_AMOUNTS)


def _add(rates: list[float], *more: float) -> None:
    for place, rate in enumerate(more):
        rates[place] += rate
