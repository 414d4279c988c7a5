"""A decision's explanation in words: fair share, what keeps the job from more, who has it, what a move costs."""

from __future__ import annotations

from collections.abc import Sequence

from polluxd.model import Allocation, Explanation
from polluxd.policy.exploration import GROWTH

from .output import count, duration, number

LIMITS = {
    "contention": "the other jobs: every GPU is worth more to them",
    "move-cost": "the cost of a move, which more GPUs would not make up for",
    "goodput": "its own scaling: more GPUs would not raise its goodput",
    "exploration": f"caution: it may take {'twice' if GROWTH == 2 else f'{GROWTH} times'} what it was measured on, "
    "and no more until measured there",
    "batch": "its batch limits: the largest batch does not divide over more GPUs",
    "counts": "the numbers of GPUs that it may be given (gpu-counts)",
    "nodes": "the nodes in service: none of its larger placements fits on them",
    "ceiling": "the GPU ceiling of its account or user",
    "fragmentation": "fragmentation: GPUs are free, but not in such a placement",
    "pinned": "being pinned: it keeps what it has in this decision",
}


def sentences(placed: Allocation, others: Sequence[Allocation], max_gpus: int | None) -> list[str]:
    """What the decision on a job knows of itself as data, for people; none where it took no part in the decision."""
    told = placed.explanation
    if told is None:
        return []
    return [
        _measure(told),
        *_limit(placed, told, max_gpus),
        *_marginal(told, others),
        *_racks(placed, told),
        *_move(told),
        *_market(told),
    ]


def _measure(told: Explanation) -> str:
    share = f"{count(told.fair_gpus, 'GPU')} on {count(told.fair_nodes, 'node')}"
    weight = f" Its weight is {told.weight:.3g} times that of the average job." if told.weight != 1.0 else ""
    return f"Its fair share: {share}.{weight}"


def _limit(placed: Allocation, told: Explanation, max_gpus: int | None) -> list[str]:
    if told.limit == "max-gpus":
        by = f"its max-gpus={max_gpus}" if max_gpus is not None else "its max-gpus"
    else:
        by = LIMITS.get(told.limit, told.limit)
    lines = [f"What keeps it from more: {by}."]
    if told.next_gpus is not None and told.limit != "pinned":
        gain = ""
        if placed.goodput > 0:
            gain = f", {100 * (told.next_goodput / placed.goodput - 1):+.0f} % against {number(3)(placed.goodput)}"
        size = count(told.next_gpus, "GPU")
        lines.append(
            f"Its next larger size: {size}, goodput {number(3)(told.next_goodput)} examples/s{gain}."
        )
    return lines


def _marginal(told: Explanation, others: Sequence[Allocation]) -> list[str]:
    """What more GPUs would be worth here, and what the cheapest of those given are worth where they went."""
    if told.next_gpus is None or told.limit == "pinned":
        return []
    worth = f"Per GPU that is worth {number(3)(told.marginal)} to the objective"
    if told.taken_by is None:
        return [f"{worth}."]
    taker = next((a for a in others if a.job_id == told.taken_by), None)
    has = ""
    if taker is not None and taker.placement:
        has = f" ({count(taker.placement.gpus, 'GPU')}, {number(3)(taker.speedup)} times its fair share)"
    # Near the margin the next size here and the last one there need not fit into each other.
    outcome = (
        "more than is won here"
        if told.price > told.marginal
        else "but no exchange of whole sizes was found that pays"
    )
    return [
        f"{worth}; of the GPUs given out, the last of some job are worth {number(3)(told.price)} each, and none less. "
        f"Of the other jobs, job {told.taken_by}{has} would lose the least by giving some up, {outcome}."
    ]


def _market(told: Explanation) -> list[str]:
    """What a GPU costs, what the next one would bring here, and when the job ends."""
    parts = []
    if told.gpu_price is not None:
        parts.append(
            f"a GPU costs {number(3)(told.gpu_price)} s of all jobs' completion times per second now"
        )
        if told.next_gpus is not None and told.limit != "pinned":
            parts.append(f"its next one would bring {number(3)(told.marginal)} s")
    if told.seconds_left is not None:
        parts.append(f"at its planned goodput it ends in {duration(told.seconds_left)}")
    sentence = ", ".join(parts)
    return [f"{sentence[0].upper()}{sentence[1:]}."] if parts else []


def with_node_more(placed: Allocation, more: Allocation | None) -> str:
    """What one node more would change for the job."""
    if more is None:
        return ""
    now, then = placed.placement.gpus, more.placement.gpus
    if now == then:
        return f"With one node more it would get no other number of GPUs than {now}."
    ends = more.explanation.seconds_left if more.explanation is not None else None
    end = "" if ends is None else f" and end in {duration(ends)}"
    return f"With one node more it would get {count(then, 'GPU')} instead of {now}{end}."


def _racks(placed: Allocation, told: Explanation) -> list[str]:
    if told.racks == 0:
        return []
    if told.racks == 1:
        return ["Its nodes lie in one rack."]
    lines = f"Its nodes lie in {told.racks} racks"
    if told.one_rack > 0 and placed.goodput > 0:
        gain = 100 * (told.one_rack / placed.goodput - 1)
        return [
            f"{lines}; as many in one rack would bring it {number(3)(told.one_rack)} examples/s, {gain:+.0f} %."
        ]
    return [f"{lines}; it was not measured over racks yet."]


def _move(told: Explanation) -> list[str]:
    if told.move_seconds <= 0:
        return ["It has not run yet: to start costs it nothing."]
    return [
        f"A move would cost it about {duration(told.move_seconds)} of training; in the decision its speedup then "
        f"counts {number(3)(told.move_factor)} times."
    ]
