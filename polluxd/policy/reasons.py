"""Why a job got what it got, in one sentence that its user can read."""

from __future__ import annotations

from polluxd.model import Explanation, Job, Placement
from polluxd.policy import exploration
from polluxd.policy.explain import Explainer
from polluxd.policy.menu import Menu


def count(gpus: int) -> str:
    return f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"


def where(placement: Placement) -> str:
    """`n1`, or `n1 and 3 more`: the nodes, short enough for a table."""
    if len(placement.nodes) <= 2:
        return " and ".join(placement.nodes)
    return f"{placement.nodes[0]} and {len(placement.nodes) - 1} more"


def percent(ratio: float) -> str:
    """A ratio as the change it is: 1.5 -> `+50 %`."""
    change = (ratio - 1.0) * 100.0
    return f"{change:+.0f} %" if abs(change) < 1000 else f"x{ratio:.0f}"


def of(explainer: Explainer, j: int, placement: Placement, explanation: Explanation) -> str:
    """The reason for job `j` of the menu: what happens, and why not more."""
    menu = explainer.seating.menu
    if menu.pinned[j]:
        return _pinned(menu.jobs[j])
    change = _change(menu, j, explainer.seating.option[j], placement)
    return f"{change}; {_why_not_more(explainer, j, explanation)}"


def _pinned(job: Job) -> str:
    reason = job.pin_reason or ("not preemptible" if not job.spec.preemptible else "pinned")
    if not job.placement:
        return f"waits: {reason}"
    return f"keeps {count(job.placement.gpus)} on {where(job.placement)}: {reason}"


def _change(menu: Menu, j: int, option: int, placement: Placement) -> str:
    job, now = menu.jobs[j], menu.jobs[j].placement
    speed = f"{menu.speedup[option]:.2f} times its fair share"
    if not placement:
        return f"parked, gives up {count(now.gpus)}" if now else "waits for GPUs"
    there = f"{count(placement.gpus)} on {where(placement)}"
    if not now:
        return f"{'restarts' if job.started else 'starts'} with {there}, {speed}"
    if placement == now:
        return f"keeps {there}, {speed}"
    before = [o for o in menu.options(j) if menu.kept[o]]
    gained = ""
    if before and menu.goodput[before[0]] > 0:
        gained = f", goodput {percent(float(menu.goodput[option] / menu.goodput[before[0]]))}"
    if placement.gpus == now.gpus:
        return f"moves from {where(now)} to {there}{gained}"
    verb = "grows" if placement.gpus > now.gpus else "shrinks"
    return f"{verb} from {now.gpus} to {there}{gained}"


def _why_not_more(explainer: Explainer, j: int, explanation: Explanation) -> str:
    menu, option = explainer.seating.menu, explainer.seating.option[j]
    step, limit = explanation.next_gpus, explanation.limit
    if step is None:
        return _own_limit(menu.jobs[j], limit, explainer.seating.gpus[option])
    if explainer.seating.gpus[option] == 0:
        gain = f"{count(step)} would be its least"
    else:
        gain = f"{count(step)} would bring {percent(explanation.next_goodput / float(menu.goodput[option]))}"
    if limit == "move-cost":
        return f"{gain}, less than another move would cost"
    if limit == "ceiling":
        return f"{gain}, but the ceiling of {' and '.join(explainer.ceilings(j))} is reached"
    if limit == "fragmentation":
        return f"{gain}, but the {count(explainer.free)} left free do not make up such a placement"
    taker = f", those of job {explanation.taken_by} the least" if explanation.taken_by is not None else ""
    return f"{gain}, but every GPU serves others more{taker}"


def _own_limit(job: Job, limit: str, held: int) -> str:
    spec = job.spec
    if limit == "goodput":
        return "more GPUs would not raise its goodput"
    if limit == "max-gpus":
        return f"max-gpus={spec.max_gpus} allows no more"
    if limit == "batch":
        return "its batch limits allow no more GPUs"
    if limit == "exploration":
        explored = job.report.explored_gpus if job.report is not None else 0
        if explored == 0:
            return f"not measured yet, so it begins with min-gpus={spec.min_gpus}"
        return f"measured on at most {count(explored)} so far, so at most {exploration.cap(job)} now"
    return f"no placement of more than {count(held)} is possible on the nodes in service"
