"""What every plan must hold, whatever the cluster looks like."""

from __future__ import annotations

from collections import Counter

from polluxd.policy.feasible import is_pinned
from polluxd.policy.shapes import Shape, allows


def check(snap, plan):
    """Check capacity, partitions, limits and interference of a plan.

    Jobs that the plan leaves alone may have any placement.
    """
    by_name = {n.name: n for n in snap.nodes}
    assert [a.job_id for a in plan.allocations] == sorted(j.job_id for j in snap.jobs)
    used, spans = Counter(), Counter()
    for j in snap.jobs:
        a = plan.of(j.job_id)
        assert a.changed == (a.placement != j.placement)
        assert a.reason
        if is_pinned(j):
            assert a.placement == j.placement
        for name in a.placement.nodes:
            used[name] += a.placement.gpus_per_node
            spans[name] += len(a.placement.nodes) > 1 and a.changed
            if a.changed:
                n = by_name[name]
                assert n.schedulable
                assert not n.partitions.isdisjoint(j.partition.split(","))
                assert len(a.placement.nodes) == 1 or (
                    snap.settings.partial_nodes or a.placement.gpus_per_node == n.gpus
                )
        if a.placement and a.changed:
            assert a.placement.gpus >= j.spec.min_gpus
            assert a.placement.gpus <= (j.spec.max_gpus or 10**9)
            whole = a.placement.gpus_per_node == by_name[a.placement.nodes[0]].gpus
            shape = Shape(len(a.placement.nodes), a.placement.gpus_per_node)
            if a.placement.gpus != j.placement.gpus:
                assert allows(snap.settings.gpu_counts, shape, whole=whole)
                assert allows(j.spec.gpu_counts, shape, whole=whole)
            if j.report is not None and j.report.params is not None:
                assert a.goodput > 0
                assert a.batch_size > 0
    for name, gpus in used.items():
        fixed = sum(
            j.placement.gpus_per_node
            for j in snap.jobs
            if name in j.placement.nodes and not plan.of(j.job_id).changed
        )
        # Jobs left where they are may sit on a node that went out of service under them.
        assert gpus <= max(by_name[name].capacity, fixed)
        assert spans[name] <= 1
    for kind, ceilings in (
        ("account", snap.settings.account_ceilings),
        ("user", snap.settings.user_ceilings),
    ):
        for name, ceiling in ceilings.items():
            own = [j for j in snap.jobs if getattr(j, kind) == name]
            fixed = sum(j.placement.gpus for j in own if is_pinned(j) or not plan.of(j.job_id).changed)
            assert sum(plan.of(j.job_id).placement.gpus for j in own) <= max(ceiling, fixed)
    # Both are below 0 where running jobs are parked for jobs that have waited long.
    assert plan.objective <= plan.upper_bound + 1e-9 * abs(plan.upper_bound)
    assert 0 <= plan.gap < 1
