"""Why a job got what it got, in one sentence that its user can read."""

from __future__ import annotations

from typing import NamedTuple

from polluxd.model import Job, JobSpec, Placement
from polluxd.policy import exploration


class Said(NamedTuple):
    """All that the reason of a job which takes part speaks of: equal facts make equal sentences."""

    now: Placement
    place: Placement
    """What it holds, and what it gets."""
    started: bool
    speedup: float
    goodput: float
    before: float
    """Goodput on what it holds now; 0 where it cannot stay."""
    limit: str
    step: int
    """GPUs of the next larger placement that would raise its goodput; 0: there is none."""
    next_goodput: float
    about: str | int | tuple[str, int] | tuple[JobSpec, int, int] | None
    """Of a ceiling its name, with its GPUs where these are fewer than the job's least; of fragmentation the GPUs left
    free; of a limit of its own the spec, the most GPUs measured on, and the most that this allows."""


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


def of(said: Said) -> str:
    """The reason: what happens, and why not more."""
    if said.limit == "ceiling" and isinstance(said.about, tuple):
        name, ceiling = said.about[:2]
        why = f"infeasible: {count(said.step)} would be its least, and the ceiling of {name} is {count(ceiling)}"
        return f"{_change(said)}; {why}" if said.now else why
    return f"{_change(said)}; {_why_not_more(said)}"


def of_taker(job_id: int) -> str:
    """What a reason of contention goes on with: apart, since it is another job in nearly every decision."""
    return f", those of job {job_id} the least"


def of_pinned(job: Job) -> str:
    """The reason for a job that this plan must leave as it is."""
    reason = job.pin_reason or ("not preemptible" if not job.spec.preemptible else "pinned")
    if not job.placement:
        return f"waits: {reason}"
    return f"keeps {count(job.placement.gpus)} on {where(job.placement)}: {reason}"


def _change(said: Said) -> str:
    now, place = said.now, said.place
    speed = f"{said.speedup:.2f} times its fair share"
    if not place:
        return f"parked, gives up {count(now.gpus)}" if now else "waits for GPUs"
    there = f"{count(place.gpus)} on {where(place)}"
    if not now:
        return f"{'restarts' if said.started else 'starts'} with {there}, {speed}"
    if place == now:
        return f"keeps {there}, {speed}"
    gained = f", goodput {percent(said.goodput / said.before)}" if said.before > 0 else ""
    if place.gpus == now.gpus:
        return f"moves from {where(now)} to {there}{gained}"
    verb = "grows" if place.gpus > now.gpus else "shrinks"
    return f"{verb} from {now.gpus} to {there}{gained}"


def _why_not_more(said: Said) -> str:
    step, limit, about = said.step, said.limit, said.about
    if not step:
        return _own_limit(limit, about, said.place.gpus)
    if not said.place:
        gain = f"{count(step)} would be its least"
    else:
        gain = f"{count(step)} would bring {percent(said.next_goodput / said.goodput)}"
    if limit == "move-cost":
        return f"{gain}, less than another move would cost"
    if limit == "ceiling":
        return f"{gain}, but the ceiling of {about} is reached"
    if limit == "fragmentation":
        return f"{gain}, but the {count(int(str(about)))} left free do not make up such a placement"
    return f"{gain}, but every GPU serves others more"


def _own_limit(limit: str, about: object, held: int) -> str:
    if limit == "goodput" or not isinstance(about, tuple):
        return "more GPUs would not raise its goodput"
    spec, explored, most = about
    if limit == "max-gpus":
        if held >= spec.max_gpus:
            return f"max-gpus={spec.max_gpus} allows no more"
        between = (
            count(spec.max_gpus) if held + 1 == spec.max_gpus else f"{held + 1} to {count(spec.max_gpus)}"
        )
        return f"no placement of {between} is possible, and max-gpus={spec.max_gpus} allows no more"
    if limit == "batch":
        return "its batch limits allow no more GPUs"
    if limit == "exploration":
        if explored == 0:
            return f"not measured yet, so it begins with min-gpus={spec.min_gpus}"
        return f"measured on at most {count(explored)} so far, so at most {most} now"
    if limit == "counts":
        return f"no placement of more than {count(held)} has a count that gpu-counts allows"
    return f"no placement of more than {count(held)} is possible on the nodes in service"


def own(job: Job) -> tuple[JobSpec, int, int]:
    """What a limit of the job's own is told with."""
    report = job.report
    # As the cap counts them: what earlier runs of the same training were measured on is among it.
    explored = 0 if report is None else max(report.explored_gpus, report.prior_gpus)
    return job.spec, explored, exploration.cap(job)
