"""How many nodes a cloud cluster should have (Pollux, section 4.2.2).

    UTILITY(A) = sum_j SPEEDUP1_j(A_j) / GPUs                SPEEDUP1: against one GPU

Near 1, every GPU of a job is worth as much as its first. Near 0, most GPUs are wasted on jobs that do not gain from
them. While the utility is between the two thresholds, the cluster keeps its size. Otherwise a binary search finds the
size whose utility is nearest to the middle of the thresholds. This module is pure: it starts and stops no node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pollux.goodput import Goodput
from polluxd.model import NO_PLACEMENT, Node, Plan, Snapshot
from polluxd.policy.decision import decide
from polluxd.policy.option_table import UNMEASURED_SCALING

LOW, HIGH = 0.35, 0.65
"""The artifact's thresholds."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The desired size, and why."""

    nodes: int
    utility: float
    """At the present size."""
    expected: float
    """At the desired size."""
    reason: str
    tried: tuple[tuple[int, float], ...] = ()
    """(nodes, utility) of the sizes that were looked at, smallest first."""


def utility(snapshot: Snapshot, plan: Plan) -> float:
    """Return UTILITY of a plan on the snapshot's nodes; 0 without GPUs.

    For a job without a fit, the policy's assumption on its scaling holds. SPEEDUP1 compares a job with one GPU of the
    type that the job has.
    """
    kind = {n.name: n.gpu_type for n in snapshot.nodes}
    gpus = sum(n.capacity for n in snapshot.nodes)
    if gpus == 0:
        return 0.0
    total = 0.0
    for job in snapshot.jobs:
        allocation = plan.of(job.job_id)
        if allocation is None or not allocation.placement:
            continue
        report = job.report
        if report is None or report.params is None:
            total += allocation.placement.gpus**UNMEASURED_SCALING
            continue
        own = kind.get(allocation.placement.nodes[0], "")
        fit = report.params_by_type.get(own, report.params)
        function = Goodput(fit, report.noise, report.limits_on(own), job.spec.adaptive)
        alone = float(function.optimize(1, 1).goodput)
        if alone <= 0:
            # One GPU is too small for the job's smallest batch: take the goodput per GPU that the job holds.
            alone = allocation.goodput / allocation.placement.gpus
        total += allocation.goodput / alone if alone > 0 else 0.0
    return total / gpus


def desired_nodes(
    snapshot: Snapshot,
    *,
    least: int,
    most: int,
    template: Node | None = None,
) -> Scale:
    """The number of nodes with GPUs to have, between `least` and `most`.

    Sizes are tried on copies of the snapshot: the first nodes by name stay, new ones copy `template` (default: the
    first node). Raises ValueError when the limits contradict each other or there is no node to copy.
    """
    if not 0 <= least <= most:
        raise ValueError(f"autoscaling needs 0 <= least <= most, got least={least}, most={most}")
    snapshot = replace(snapshot, nodes=tuple(n for n in snapshot.nodes if n.gpus > 0))
    present = len(snapshot.nodes)
    if not snapshot.jobs:
        return Scale(least, 0.0, 0.0, "no job: the least that is allowed")
    known: dict[int, float] = {}

    def at(size: int) -> float:
        if size not in known:
            resized = _resized(snapshot, size, template)
            known[size] = utility(resized, decide(resized, explained=False))
        return known[size]

    start = min(max(present, least), most)
    now = at(start) if start else float("inf")
    if LOW <= now <= HIGH:
        return Scale(start, now, now, f"utility {now:.2f} lies between {LOW} and {HIGH}", ((start, now),))
    if start == 0:
        start, now = 1 if most else 0, at(1) if most else 0.0
    middle = (LOW + HIGH) / 2
    best = _search(at, middle, max(least, 1), start) if now < LOW else _search(at, middle, start, most)
    side = "below" if now < LOW else "above"
    return Scale(
        best,
        now,
        at(best),
        f"utility {now:.2f} is {side} the range {LOW} to {HIGH}",
        tuple(sorted(known.items())),
    )


def _search(at: Callable[[int], float], aim: float, low: int, high: int) -> int:
    """Return the size whose utility is nearest the aim.

    Utility falls as the cluster grows. On a tie the size with fewer nodes wins.
    """
    low, high = min(low, high), max(low, high)
    bottom, top = low, high
    while bottom < top:
        middle = (bottom + top) // 2
        if at(middle) > aim:
            bottom = middle + 1
        else:
            top = middle
    near = [n for n in (bottom - 1, bottom) if low <= n <= high]
    return near[int(np.argmin([abs(at(n) - aim) for n in near]))]


def _resized(snapshot: Snapshot, size: int, template: Node | None) -> Snapshot:
    """The snapshot on `size` nodes; jobs whose nodes go would have to move."""
    nodes = sorted(snapshot.nodes, key=lambda n: n.name)[:size]
    model = template or next(iter(snapshot.nodes), None)
    if model is None and size:
        raise ValueError("autoscaling from no nodes needs a template of the nodes to add")
    while model is not None and len(nodes) < size:
        nodes.append(
            replace(model, name=f"~{len(nodes):06d}", foreign_gpus=0, foreign_cpus=0, schedulable=True)
        )
    kept = {n.name for n in nodes}
    jobs = tuple(
        job if kept.issuperset(job.placement.nodes) else replace(job, placement=NO_PLACEMENT)
        for job in snapshot.jobs
    )
    return replace(snapshot, nodes=tuple(nodes), jobs=jobs)
