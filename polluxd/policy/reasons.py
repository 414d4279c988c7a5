"""Why a job got what it got, in one sentence that its user can read."""

from __future__ import annotations

from polluxd.model import Job, Placement
from polluxd.policy import exploration
from polluxd.policy.menu import Menu
from polluxd.policy.placement import Seating


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


def of(seating: Seating, j: int, placement: Placement, free: int) -> str:
    """The reason for job `j` of the menu: what happens, and why not more. `free`: GPUs that stay unused."""
    menu = seating.menu
    job = menu.jobs[j]
    if menu.pinned[j]:
        return _pinned(job)
    return f"{_change(menu, j, seating.option[j], placement)}; {_why_not_more(seating, j, free)}"


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


def _why_not_more(seating: Seating, j: int, free: int) -> str:
    menu = seating.menu
    job, option = menu.jobs[j], seating.option[j]
    held = int(menu.gpus[option])
    larger = [o for o in menu.options(j) if menu.gpus[o] > held]
    if not larger:
        return _at_its_limit(job, held)
    better = [o for o in larger if menu.goodput[o] > menu.goodput[option] * (1 + 1e-9)]
    if not better:
        return "more GPUs would not raise its goodput"
    step = better[0]
    if held == 0:
        return f"{count(int(menu.gpus[step]))} would be its least, and {count(free)} stay free"
    more = percent(float(menu.goodput[step] / menu.goodput[option]))
    gain = f"{count(int(menu.gpus[step]))} would bring {more}"
    if max(float(menu.move[o]) for o in better) <= seating.utility(j):
        return f"{gain}, less than another move would cost"
    if free >= int(menu.gpus[step]) - held:
        return f"{gain}, but the {count(free)} left free do not make up such a placement"
    return f"{gain}, but those GPUs serve others more"


def _at_its_limit(job: Job, held: int) -> str:
    spec, most = job.spec, exploration.cap(job)
    if spec.max_gpus is not None and (held >= spec.max_gpus or spec.max_gpus <= most):
        return f"max-gpus={spec.max_gpus} allows no more"
    explored = job.report.explored_gpus if job.report is not None else 0
    if explored == 0:
        return f"not measured yet, so it begins with min-gpus={spec.min_gpus}"
    if held * 2 > most or held >= most:
        return f"measured on at most {count(explored)} so far, so at most {most} now"
    return "no larger placement is possible within its batch limits and the nodes in service"
