"""Why a job got what it got, as data: its limit, what the next GPUs would bring it, and who has them instead."""

from __future__ import annotations

from polluxd.model import Explanation, Job
from polluxd.policy import exploration
from polluxd.policy.placement import Seating


class Explainer:
    """Explanations of one finished seating."""

    def __init__(self, seating: Seating, free: int) -> None:
        self.seating = seating
        self.free = free
        """GPUs that stay unused."""
        jobs = range(len(seating.option))
        last = [(self._last_worth(j), j) for j in jobs]
        self._donors = sorted((w, j) for w, j in last if w is not None)[:2]
        self.price = self._donors[0][0] if self._donors else 0.0

    def _last_worth(self, j: int) -> float | None:
        """Utility per GPU that the job would lose by giving up its last ones in the best way; None if it cannot."""
        seating, held = self.seating, self.seating.gpus[self.seating.option[j]]
        if held == 0 or seating.pinned[j]:
            return None
        now = seating.utility(j)
        return min(
            (now - seating.value(o)) / (held - seating.gpus[o])
            for o in seating.menu.options(j)
            if seating.gpus[o] < held
        )

    def better(self, j: int) -> list[int]:
        """Options of more GPUs with more goodput, fewest GPUs first."""
        seating, option = self.seating, self.seating.option[j]
        goodput = float(seating.menu.goodput[option]) * (1 + 1e-9)
        return [
            o
            for o in seating.menu.options(j)
            if seating.gpus[o] > seating.gpus[option] and seating.menu.goodput[o] > goodput
        ]

    def of(self, j: int) -> Explanation:
        seating, menu = self.seating, self.seating.menu
        job, held, now = menu.jobs[j], seating.gpus[seating.option[j]], seating.utility(j)
        better = self.better(j)
        step = better[0] if better else None
        marginal = max(((seating.value(o) - now) / (seating.gpus[o] - held) for o in better), default=0.0)
        limit = self._limit(j, better)
        taker = next((i for _, i in self._donors if i != j), None) if limit == "contention" else None
        return Explanation(
            fair_nodes=menu.shares[j].nodes,
            fair_gpus=menu.shares[j].gpus,
            weight=float(menu.weight[j]),
            limit=limit,
            next_gpus=None if step is None else seating.gpus[step],
            next_goodput=0.0 if step is None else float(menu.goodput[step]),
            marginal=marginal,
            price=self.price,
            taken_by=None if taker is None else menu.jobs[taker].job_id,
            move_factor=float(menu.factor[j]),
            move_seconds=job.reallocation_cost if job.started else 0.0,
        )

    def _limit(self, j: int, better: list[int]) -> str:
        seating = self.seating
        held = seating.gpus[seating.option[j]]
        if seating.pinned[j]:
            return "pinned"
        if not better:
            if any(seating.gpus[o] > held for o in seating.menu.options(j)):
                return "goodput"
            return _own_limit(seating.menu.jobs[j], held)
        if max(seating.move[o] for o in better) <= seating.utility(j):
            return "move-cost"
        needed = seating.gpus[better[0]] - held
        if not seating.packing.within_ceilings(j, needed):
            return "ceiling"
        return "fragmentation" if self.free >= needed else "contention"

    def ceilings(self, j: int) -> list[str]:
        """The full groups that the job belongs to, in words."""
        packing = self.seating.packing
        more = self.seating.gpus[self.better(j)[0]] - self.seating.gpus[self.seating.option[j]]
        return [
            group.name
            for group, held in zip(packing.groups, packing.held, strict=True)
            if j in group.members and held + more > group.ceiling
        ]


def _own_limit(job: Job, held: int) -> str:
    """For a job with no larger option: which of its limits that is."""
    spec, most = job.spec, exploration.cap(job)
    if spec.max_gpus is not None and (held >= spec.max_gpus or spec.max_gpus <= most):
        return "max-gpus"
    limits = job.report.limits if job.report is not None else None
    if limits is not None:
        top = limits.maximum if spec.adaptive else limits.initial
        if (held + 1) * limits.local_min > top:
            return "batch"
    return "exploration" if held * exploration.GROWTH > most or held >= most else "nodes"
