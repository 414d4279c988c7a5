"""A decision's explanation in sentences. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from polluxd.model import Allocation, Explanation
from polluxd.policy.exploration import GROWTH

from .output import count, duration, number

LIMITS = {
    "contention": "other jobs, to which every GPU is worth more",
    "move-cost": "the cost of a move, for which more GPUs would not make up",
    "goodput": "the job's own scaling: more GPUs would not raise its goodput",
    "exploration": f"exploration: a job may take {'twice' if GROWTH == 2 else f'{GROWTH} times'} the GPUs on which it "
    "was measured, and more after it was measured there",
    "progress": "its progress, which polluxd has yet to see on the GPUs that the job holds: it gets none beyond its "
    "user's equal share until then",
    "batch": "the job's batch limits: the largest batch does not divide over more GPUs",
    "counts": "the numbers of GPUs that the job may be given (gpu-counts)",
    "nodes": "the nodes in service: no larger placement fits on them",
    "ceiling": "the GPU ceiling of its account or user",
    "fragmentation": "fragmentation: GPUs are free, but not in a placement that the job can use",
    "pinned": "the pin: the job keeps its GPUs in this decision",
}
"""What keeps a job from more GPUs, by `Explanation.limit`."""


def sentences(placed: Allocation, others: Sequence[Allocation], max_gpus: int | None) -> list[str]:
    """Return the sentences; none for a job outside the decision."""
    facts = placed.explanation
    if facts is None:
        return []
    return [
        _measure(facts),
        *_limit(placed, facts, max_gpus),
        *_marginal(facts, others),
        *_racks(placed, facts),
        *_move(facts),
        *_market(facts, waits=not placed.placement),
    ]


def _measure(facts: Explanation) -> str:
    share = f"{count(facts.fair_gpus, 'GPU')} on {count(facts.fair_nodes, 'node')}"
    weight = f" Weight: {facts.weight:.3g} times the average job's." if facts.weight != 1.0 else ""
    return f"Fair share: {share}.{weight}"


def _limit(placed: Allocation, facts: Explanation, max_gpus: int | None) -> list[str]:
    if facts.limit == "max-gpus":
        by = f"max-gpus={max_gpus}" if max_gpus is not None else "max-gpus"
    else:
        by = LIMITS.get(facts.limit, facts.limit)
    lines = [f"Limit: {by}."]
    if facts.next_gpus is not None and facts.limit != "pinned":
        gain = ""
        if placed.goodput > 0:
            gain = f" ({100 * (facts.next_goodput / placed.goodput - 1):+.0f} % against {number(3)(placed.goodput)})"
        size = count(facts.next_gpus, "GPU")
        lines.append(f"Next larger size: {size}, goodput {number(3)(facts.next_goodput)} examples/s{gain}.")
    return lines


def _marginal(facts: Explanation, others: Sequence[Allocation]) -> list[str]:
    """Compare what more GPUs would add here with what the GPUs in use add."""
    if facts.next_gpus is None or facts.limit == "pinned":
        return []
    worth = f"Each further GPU would add {number(3)(facts.marginal)} to the objective."
    if facts.taken_by is None:
        return [worth]
    taker = next((a for a in others if a.job_id == facts.taken_by), None)
    has = ""
    if taker is not None and taker.placement:
        has = f" ({count(taker.placement.gpus, 'GPU')}, {number(3)(taker.speedup)} times its fair share)"
    # Near the margin the next size here and the last one there need not fit into each other.
    outcome = (
        "but more than this job would gain"
        if facts.price > facts.marginal
        else "but polluxd found no exchange of whole sizes that pays"
    )
    return [
        f"{worth} Each GPU in use adds at least {number(3)(facts.price)}. "
        f"Job {facts.taken_by}{has} would lose least by giving up GPUs, {outcome}."
    ]


def _market(facts: Explanation, *, waits: bool) -> list[str]:
    """Say what a GPU costs and brings, and when the job ends."""
    lines = []
    if facts.gpu_price is not None:
        lines.append(
            f"A GPU now costs {number(3)(facts.gpu_price)} s of all jobs' completion times per second."
        )
        if facts.next_gpus is not None and facts.limit != "pinned":
            lines.append(f"The job's next GPU would save {number(3)(facts.marginal)} s.")
    if facts.seconds_left is not None:
        lines.append(
            f"If the jobs before it end as predicted, the job gets GPUs and ends in {duration(facts.seconds_left)}."
            if waits
            else f"At the planned goodput the job ends in {duration(facts.seconds_left)}."
        )
    return [" ".join(lines)] if lines else []


def doubts(placed: Allocation) -> list[str]:
    """Say how many of the job's reports polluxd did not believe."""
    facts = placed.explanation
    if facts is None or not facts.doubted_reports:
        return []
    reports = count(facts.doubted_reports, "report")
    now = "the newest among them" if facts.doubts else "the newest is believed"
    return [f"polluxd did not believe claims of {reports} of the job since polluxd started; {now}."]


def with_node_more(placed: Allocation, more: Allocation | None) -> str:
    """Say what one more node in the cluster would change for the job."""
    if more is None:
        return ""
    now, then = placed.placement.gpus, more.placement.gpus
    if now == then:
        return f"With one more node in the cluster the job would still get {count(now, 'GPU')}."
    ends = more.explanation.seconds_left if more.explanation is not None else None
    end = "" if ends is None else f" and end in {duration(ends)}"
    return f"With one more node in the cluster the job would get {count(then, 'GPU')} instead of {now}{end}."


def _racks(placed: Allocation, facts: Explanation) -> list[str]:
    if facts.racks == 0:
        return []
    if facts.racks == 1:
        return ["The nodes are in one rack."]
    here = f"The nodes are in {facts.racks} racks."
    if facts.one_rack > 0 and placed.goodput > 0:
        gain = 100 * (facts.one_rack / placed.goodput - 1)
        return [
            f"{here} As many nodes in one rack would bring {number(3)(facts.one_rack)} examples/s ({gain:+.0f} %)."
        ]
    return [f"{here} The job was not measured across racks yet."]


def _move(facts: Explanation) -> list[str]:
    if facts.move_seconds <= 0:
        return ["The job has not run yet: starting it costs nothing."]
    return [
        f"A move would cost about {duration(facts.move_seconds)} of training. "
        f"A placement that needs a move counts with {number(3)(facts.move_factor)} times its speedup."
    ]
