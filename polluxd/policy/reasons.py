"""The reason for a job's placement, in one sentence for its user."""

from __future__ import annotations

from typing import NamedTuple

from polluxd.model import JobSpec, Placement, SnapshotJob


class Contention(NamedTuple):
    """Other jobs make more of every GPU."""

    taker: int | None
    """The job that would lose least by giving up GPUs, but more than this job would gain. None: no such job."""


class MoveCost(NamedTuple):
    """More GPUs would bring less than the move costs."""


class NoGain(NamedTuple):
    """No larger placement has a higher goodput."""


class Ceiling(NamedTuple):
    """The GPU ceiling of an account or user is reached."""

    groups: str
    """In words: `account lab and user ada`."""
    most: int | None = None
    """GPUs of a ceiling that is below the least that the job can use."""


class Fragmentation(NamedTuple):
    """Enough GPUs are free, but not in one placement."""

    free: int


class OwnLimit(NamedTuple):
    """A limit of the job's own.

    Kinds: `max-gpus`, `batch`, `progress`, `exploration`, `counts` or `nodes`.
    """

    kind: str
    spec: JobSpec
    measured: int
    """Most GPUs that the job, or an earlier run of the same training, was measured on."""
    most: int
    """GPUs that its measurements and its progress allow."""
    rule: str = ""
    """Slurm's rule that `max-gpus` stands for; empty: the user's own."""


Obstacle = Contention | MoveCost | NoGain | Ceiling | Fragmentation | OwnLimit
"""What keeps a job from more GPUs."""


class Facts(NamedTuple):
    """The facts for the reason of a job that takes part."""

    now: Placement
    place: Placement
    """What it holds, and what it gets."""
    started: bool
    speedup: float
    goodput: float
    before: float
    """Goodput at its present placement; 0 if it cannot stay there."""
    obstacle: Obstacle
    step: int
    """GPUs of the next larger placement that would raise its goodput; 0: there is none."""
    next_goodput: float


def count(gpus: int) -> str:
    """Write a number of GPUs: `1 GPU`, `2 GPUs`."""
    return f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"


def where(placement: Placement) -> str:
    """Name the nodes, short enough for a table: `n1`, or `n1 and 3 more`."""
    if len(placement.nodes) <= 2:
        return " and ".join(placement.nodes)
    return f"{placement.nodes[0]} and {len(placement.nodes) - 1} more"


def percent(ratio: float) -> str:
    """Write a ratio as a change: 1.5 becomes `+50 %`."""
    change = (ratio - 1.0) * 100.0
    return f"{change:+.0f} %" if abs(change) < 1000 else f"x{ratio:.0f}"


def of(facts: Facts) -> str:
    """Say what happens to the job, and why it does not get more GPUs."""
    obstacle = facts.obstacle
    if isinstance(obstacle, Ceiling) and obstacle.most is not None:
        why = (
            f"infeasible: the job needs at least {count(facts.step)}, and the ceiling of {obstacle.groups} is "
            f"{count(obstacle.most)}"
        )
        return f"{_change(facts)}; {why}" if facts.now else why
    return f"{_change(facts)}; {_why_not_more(facts)}"


def of_pinned(job: SnapshotJob) -> str:
    """Say why this plan leaves the job as it is."""
    reason = job.pin_reason or ("not preemptible" if not job.spec.preemptible else "pinned")
    if not job.placement:
        return f"waits: {reason}"
    return f"keeps {count(job.placement.gpus)} on {where(job.placement)}: {reason}"


def _change(facts: Facts) -> str:
    now, place = facts.now, facts.place
    speed = f"{facts.speedup:.2f} times its fair share"
    if not place:
        return f"parked, gives up {count(now.gpus)}" if now else "waits for GPUs"
    there = f"{count(place.gpus)} on {where(place)}"
    if not now:
        return f"{'restarts' if facts.started else 'starts'} with {there}, {speed}"
    if place == now:
        return f"keeps {there}, {speed}"
    gained = f", goodput {percent(facts.goodput / facts.before)}" if facts.before > 0 else ""
    if place.gpus == now.gpus:
        return f"moves from {where(now)} to {there}{gained}"
    verb = "grows" if place.gpus > now.gpus else "shrinks"
    return f"{verb} from {now.gpus} to {there}{gained}"


def _why_not_more(facts: Facts) -> str:
    if not facts.step:
        return _own_limit(facts)
    if facts.place:
        gain = f"{count(facts.step)} would bring {percent(facts.next_goodput / facts.goodput)}"
    else:
        gain = f"it needs at least {count(facts.step)}"
    match facts.obstacle:
        case MoveCost():
            return f"{gain}, less than the move would cost"
        case Ceiling(groups):
            return f"{gain}, but the ceiling of {groups} is reached"
        case Fragmentation(free):
            return f"{gain}, but the {count(free)} that are free for it do not form such a placement"
        case Contention(int(taker)):
            return f"{gain}, but every GPU is worth more elsewhere; those of job {taker} come closest"
        case _:
            return f"{gain}, but every GPU is worth more elsewhere"


def _own_limit(facts: Facts) -> str:
    if not isinstance(facts.obstacle, OwnLimit):
        return "more GPUs would not raise its goodput"
    (kind, spec, measured, most, rule), held = facts.obstacle, facts.place.gpus
    if kind == "max-gpus":
        assert spec.max_gpus is not None
        bound = rule or f"max-gpus={spec.max_gpus}"
        if held >= spec.max_gpus:
            return f"{bound} allows no more"
        between = (
            count(spec.max_gpus) if held + 1 == spec.max_gpus else f"{held + 1} to {count(spec.max_gpus)}"
        )
        return f"no placement of {between} is possible, and {bound} allows no more"
    if kind == "batch":
        return "its batch limits allow no more GPUs"
    if kind == "progress":
        here = f" on its {count(facts.now.gpus)}" if facts.now else ""
        return f"polluxd has yet to see progress{here}, so at most {most} until then"
    if kind == "exploration":
        if measured == 0:
            if most > spec.min_gpus:
                return f"not measured yet, so at most {count(most)} now"
            return f"not measured yet, so it begins with min-gpus={spec.min_gpus}"
        return f"measured on at most {count(measured)} so far, so at most {most} now"
    if kind == "counts":
        return f"no placement of more than {count(held)} has a count that gpu-counts allows"
    memory = f" with {spec.mem_per_gpu_mb} MB of memory each" if spec.mem_per_gpu_mb else ""
    return f"no placement of more than {count(held)}{memory} is possible on the nodes in service"
