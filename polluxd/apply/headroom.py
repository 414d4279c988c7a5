"""Decide how many GPUs Slurm's limits allow each job.

A limit on running jobs or licenses is given to waiting jobs in order of submission. All functions here are pure.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil, isinf

from polluxd.apply.limit_scopes import JobBounds, LimitScope, Lookup, submit_slots
from polluxd.apply.startable import Eligibility, time_left
from polluxd.model import GpuLimit, JobState, Move, Node, Placement
from polluxd.slurm.limits import JobLimits
from polluxd.slurm.protocol import ClusterState, SlurmJob
from polluxd.slurm.site_defaults import LeastSizes

_USING = (JobState.RUNNING, JobState.SUSPENDED)
_LIMIT = re.compile(r"(Assoc|QOS)?(Grp|Max)\w*|Resources|Priority")
"""squeue(1), JOB REASON CODES: a limit on what jobs hold together keeps the job out, or a lack of GPUs."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """What Slurm's limits leave to the jobs of Pollux."""

    most: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    """Most GPUs of a job, and the rule."""
    groups: tuple[GpuLimit, ...] = ()
    """Most GPUs of several jobs together."""
    eligibility: Mapping[int, Eligibility] = field(default_factory=dict)
    """Jobs that Slurm would start on no node."""
    no_companion: Mapping[int, str] = field(default_factory=dict)
    """Jobs that may take no further companion, and the rule."""
    gives_back: Collection[int] = ()
    """Jobs that may not keep what they hold beyond `most`: others need it."""
    admitted: Collection[int] = ()
    """Plain jobs that a limit keeps out, and for which jobs of Pollux give way within it."""


def headroom(state: ClusterState, moves: Iterable[Move]) -> Headroom:
    """Return what Slurm's limits leave to each job of Pollux; a job with a move under way counts at its target."""
    targets = {move.job_id: move.target for move in moves}
    nodes = {node.name: node for node in state.nodes}
    ours = [job for job in state.jobs if job.spec is not None and not job.state.finished and not job.tasks]
    ours.sort(key=lambda job: (job.submit_time, job.job_id))
    bounds = Lookup(state)
    most: dict[int, tuple[int, str]] = {}
    eligibility: dict[int, Eligibility] = {}
    reach = {partition: _reach(partition, state, nodes) for partition in {job.partition for job in ours}}
    slots = submit_slots(state, ours, bounds)
    minutes = _minutes_used(state, bounds)
    least = LeastSizes(state.nodes, state.rules.partitions, state.limits)
    for job in ours:
        cap = _cap(job, bounds.of(job).job, state, reach[job.partition])
        caps = [one for one in (cap, slots.returns.get(job.job_id)) if one is not None]
        running = _of_running_minutes(job, bounds.of(job), minutes, state, reach[job.partition])
        if running is not None and running[0] < max(job.spec.min_gpus if job.spec else 1, 1):
            eligibility[job.job_id] = Eligibility(frozenset(), f"{running[1]} leaves no room for it now")
        elif running is not None:
            caps.append(running)
        if caps:
            most[job.job_id] = min(caps)
        if (why := _kept_out(job, bounds.of(job), state)) or (why := cap[1] if cap and cap[0] < 1 else ""):
            eligibility[job.job_id] = Eligibility(frozenset(), why)
        if 0 < sum(job.gpus_per_node_held.values()) < (fewest := least.of(job)):
            why = f"MinNodes or MinTRESPerJob asks for {fewest} GPUs"
            eligibility[job.job_id] = Eligibility(frozenset(), why)
    holding = {job.job_id: _gpus(job, targets) for job in ours}
    groups, full, admitted = _groups(state, ours, bounds, holding, nodes)
    for job_id, eligible in (
        *full.items(),
        *_array_turns(ours, holding).items(),
        *_unlicensed(ours, holding, state).items(),
    ):
        eligibility.setdefault(job_id, eligible)
    return Headroom(most, groups, eligibility, slots.none_left, slots.returns.keys(), admitted)


def _gpus(job: SlurmJob, targets: Mapping[int, Placement]) -> int:
    """GPUs that the job holds, or that a move under way brings it."""
    target = targets.get(job.job_id)
    return sum(job.gpus_per_node_held.values()) if target is None else target.gpus


def _cap(
    job: SlurmJob, limits: Iterable[tuple[str, JobLimits]], state: ClusterState, reach: tuple[set[str], int]
) -> tuple[int, str] | None:
    """Most GPUs of the job by limits per job."""
    assert job.spec is not None
    found: list[tuple[int, str]] = []
    kinds, largest = reach
    for name, one in limits:
        for tres, most in one.tres.items():
            gpus = _in_gpus(tres, most, job, kinds, largest)
            if gpus is not None:
                found.append((gpus, f"MaxTRESPerJob={tres}={most} of {name}"))
        for tres, most in one.per_node.items():
            gpus = _in_gpus(tres, most, job, kinds, largest)
            # A job on several nodes takes them whole, so the limit bounds jobs that fit on a part of a node.
            if gpus is not None and job.spec.min_gpus <= gpus < largest:
                found.append((gpus, f"MaxTRESPerNode={tres}={most} of {name}"))
        for tres, most in one.minutes.items():
            gpus = _in_gpus(tres, _over(most, minutes_left(job, state.taken_at)), job, kinds, largest)
            if gpus is not None:
                gpus = max(gpus, sum(job.gpus_per_node_held.values()))
                found.append((gpus, f"MaxTRESMinsPerJob={tres}={most} of {name}, within its time limit,"))
    rules = [state.rules.partitions.get(name) for name in job.partition.split(",")]
    if rules and all(rule is not None and rule.max_nodes is not None for rule in rules):
        most = max(rule.max_nodes or 0 for rule in rules if rule is not None)
        found.append((most * largest, f"MaxNodes={most} of partition {job.partition}"))
    return min(found, default=None)


def _reach(partition: str, state: ClusterState, nodes: Mapping[str, Node]) -> tuple[set[str], int]:
    """GPU types and most GPUs of a node that a `--partition` leads to."""
    found = [nodes[name] for name in state.reach(partition) if name in nodes and nodes[name].gpus > 0]
    return {node.gpu_type for node in found}, max((node.gpus for node in found), default=0)


def minutes_left(job: SlurmJob, now: float) -> float:
    """Return the time limit that Slurm would count if the job started again now [min]."""
    left = time_left(job, now)
    return left if isinf(left) else float(max(1, ceil(left / 60.0)))


def _over(most: int, minutes: float) -> int:
    return 0 if isinf(minutes) else int(most // minutes)


def _minutes_used(state: ClusterState, bounds: Lookup) -> Mapping[tuple[str, str], Mapping[int, float]]:
    """What each running job may still use until its time limit, by scope and TRES [minutes x TRES]."""
    used: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for job in state.jobs:
        if job.state not in _USING:
            continue
        for scope in bounds.of(job).scopes:
            for tres in {rule.partition("=")[2] for rule in scope.limits.running_minutes}:
                alone = job.tres.get(tres, 0) + sum(one.tres.get(tres, 0) for one in job.companions)
                used[scope.name, tres][job.job_id] = (
                    alone * minutes_left(job, state.taken_at) if alone else 0.0
                )
    return used


def _of_running_minutes(
    job: SlurmJob,
    bounds: JobBounds,
    used: Mapping[tuple[str, str], Mapping[int, float]],
    state: ClusterState,
    reach: tuple[set[str], int],
) -> tuple[int, str] | None:
    """Most GPUs of the job by limits on what running jobs may still use (GrpTRESRunMins); no fewer than it holds."""
    found = []
    for scope in bounds.scopes:
        for rule, most in scope.limits.running_minutes.items():
            tres = rule.partition("=")[2]
            if f"{rule} minutes" not in scope.enforced:
                continue
            use = used[scope.name, tres]
            factor = _usage_factor(job, scope.limits.counted_minutes.get(tres, 0), sum(use.values()))
            others = factor * sum(minutes for number, minutes in use.items() if number != job.job_id)
            left = 0 if isinf(others) else max(0, most - int(others))
            gpus = _in_gpus(tres, _over(left, factor * minutes_left(job, state.taken_at)), job, *reach)
            if gpus is not None:
                gpus = max(gpus, sum(job.gpus_per_node_held.values()))
                found.append((gpus, f"{rule}={most} of {scope.name}"))
    return min(found, default=None)


def _usage_factor(job: SlurmJob, counted: int, used: float) -> float:
    """By how much Slurm counts more than jobs use: a QOS has a UsageFactor.

    What Slurm shows may be as old as a job that has ended since, so a waiting job does not go by it.
    """
    return counted / used if job.gpus_per_node_held and 0.0 < 1.2 * used < counted else 1.0


def _in_gpus(tres: str, most: int, job: SlurmJob, kinds: set[str], largest: int) -> int | None:
    """A limit on TRES as a number of GPUs.

    None: it does not limit GPUs, or nobody knows what the job uses of it; such a limit is left to Slurm's refusal.
    """
    if tres.startswith("gres/gpu:") and kinds == {tres.removeprefix("gres/gpu:")}:
        return most
    if tres == "node":
        return most * largest
    each = _per_gpu(tres, job)
    return int(most / each) if each else None


def _per_gpu(tres: str, job: SlurmJob) -> float:
    """What goes with each GPU of the job; 0: nothing, as far as anybody knows."""
    if tres == "gres/gpu":
        return 1.0
    if tres == "cpu":
        return max(job.spec.cpus_per_gpu if job.spec else 1, 1)
    if tres == "mem":
        return job.mem_per_gpu_mb
    # Such as `billing`, which a partition's weights make: what Slurm counts of the job now.
    return job.tres.get(tres, 0) / max(job.tres.get("gres/gpu", 0), 1)


def _kept_out(job: SlurmJob, bounds: JobBounds, state: ClusterState) -> str:
    """The rule by which Slurm would start the job nowhere; empty: none."""
    used_up = [
        f"{rule} of {scope.name} is used up" for scope in bounds.scopes for rule in scope.limits.used_up
    ]
    if used_up:
        return used_up[0]
    left = time_left(job, state.taken_at)
    for name, limits in bounds.job:
        if limits.wall_s is not None and left > limits.wall_s:
            return f"its time limit is above MaxWall={limits.wall_s / 60:.0f} min of {name}"
    return ""


def _groups(
    state: ClusterState,
    ours: list[SlurmJob],
    bounds: Lookup,
    holding: Mapping[int, int],
    nodes: Mapping[str, Node],
) -> tuple[tuple[GpuLimit, ...], dict[int, Eligibility], frozenset[int]]:
    """Limits on GPUs of several jobs, jobs that no group has room for, and plain jobs that get room in all groups."""
    limited, use, members = _limited(state, ours, bounds)
    groups: list[GpuLimit] = []
    full: dict[int, Eligibility] = {}
    kinds = {node.gpu_type for node in nodes.values() if node.gpus > 0}
    largest = max((node.gpus for node in nodes.values()), default=0)
    order = {job.job_id: number for number, job in enumerate(ours)}
    admitted, reserved = _given_way(state, bounds, members, use, holding)
    for (name, key), jobs in sorted(members.items(), key=lambda entry: entry[0]):
        jobs.sort(key=lambda job: order[job.job_id])
        if key == "jobs":
            most = limited[name].limits.jobs or 0
            full |= _by_turns(
                jobs, holding, most - use[name]["jobs"], f"the limit of {most} running jobs of {name}"
            )
            continue
        most = limited[name].limits.tres[key]
        greediest = max(jobs, key=lambda job: (_per_gpu(key, job), job.job_id))
        left = _in_gpus(key, most - use[name][key], greediest, kinds, largest)
        if left is None:
            continue
        rule = f"{key}={most} of {name}"
        if sum(holding[job.job_id] for job in jobs) > left:
            # Lowered below what the jobs hold: Slurm lets them run, and starts none of them again.
            eligible = Eligibility(
                frozenset(), f"Slurm's limit {rule} is exceeded: Slurm would not start it again"
            )
            full |= {job.job_id: eligible for job in jobs}
        else:
            if reserved[name, key]:
                less = most - use[name][key] - reserved[name, key]
                left = _in_gpus(key, less, greediest, kinds, largest) or 0
            groups.append(GpuLimit(rule, tuple(job.job_id for job in jobs), left))
    return tuple(groups), full, admitted


def _limited(
    state: ClusterState, ours: list[SlurmJob], bounds: Lookup
) -> tuple[dict[str, LimitScope], dict[str, dict[str, int]], dict[tuple[str, str], list[SlurmJob]]]:
    """The scopes with limits, what other jobs use of each, and our jobs by scope and TRES that they count in."""
    limited: dict[str, LimitScope] = {}
    use: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    members: dict[tuple[str, str], list[SlurmJob]] = defaultdict(list)
    mine = {job.job_id for job in ours}
    for job in state.jobs:
        for scope in bounds.of(job).scopes if not job.state.finished else ():
            if not scope.limits.tres and scope.limits.jobs is None:
                continue
            limited[scope.name] = scope
            counted = job.job_id in mine
            for key in (*scope.limits.tres, "jobs"):
                if counted and key in scope.enforced:
                    members[scope.name, key].append(job)
                elif job.state in _USING:
                    use[scope.name][key] += 1 if key == "jobs" else job.tres.get(key, 0)
    return limited, use, members


def _given_way(
    state: ClusterState,
    bounds: Lookup,
    members: Mapping[tuple[str, str], Iterable[SlurmJob]],
    use: Mapping[str, Mapping[str, int]],
    holding: Mapping[int, int],
) -> tuple[frozenset[int], Mapping[tuple[str, str], int]]:
    """Return the plain jobs that jobs of Pollux give way to within limits, and what that takes of each limit.

    A job of Pollux that grew holds more than its user asked for. Without polluxd the plain job would have started. The
    jobs keep their least sizes.

    Args:
        members: jobs of Pollux by scope and TRES.
        use: what other jobs hold, by scope and TRES.
    """
    reserved: dict[tuple[str, str], int] = defaultdict(int)
    admitted = set[int]()
    # One that waits for GPUs keeps its room: else jobs of Pollux would grow into the limit again before it starts.
    kept_out = [job for job in state.jobs if job.spec is None and _LIMIT.match(job.reason)]
    for job in sorted(kept_out, key=lambda job: (-job.priority, job.submit_time)):
        if job.state is not JobState.PENDING or job.held_by_user or job.dependent:
            continue
        if not _has_gpus(job, state, members, holding):
            continue
        wanted = {}
        for scope in bounds.of(job).scopes:
            for key, most in scope.limits.tres.items():
                asked = job.tres.get(key, 0)
                if not asked or key not in scope.enforced or (scope.name, key) not in members:
                    continue
                least = sum(_least(one, key, holding) for one in members[scope.name, key])
                room = most - use[scope.name][key] - reserved[scope.name, key]
                wanted[scope.name, key] = asked if least + asked <= room else -1
        if wanted and min(wanted.values()) >= 0:
            admitted.add(job.job_id)
            for place, asked in wanted.items():
                reserved[place] += asked
    return frozenset(admitted), reserved


def _has_gpus(
    job: SlurmJob,
    state: ClusterState,
    members: Mapping[tuple[str, str], Iterable[SlurmJob]],
    holding: Mapping[int, int],
) -> bool:
    """Whether the nodes that a plain job may use have GPUs for it once jobs of Pollux have given way."""
    reach = state.reach(job.partition)
    room = sum(node.capacity for node in state.nodes if node.name in reach)
    ours = {one.job_id: one for jobs in members.values() for one in jobs}
    return job.tres.get("gres/gpu", 0) <= room - sum(
        _least(one, "gres/gpu", holding) for one in ours.values()
    )


def _least(job: SlurmJob, tres: str, holding: Mapping[int, int]) -> int:
    """What a job of Pollux holds of a TRES once it has given back all that it may."""
    assert job.spec is not None
    held = holding[job.job_id]
    if not held:
        return 0
    gpus = min(held, job.spec.min_gpus) if job.spec.gpu_counts == "any" and job.spec.preemptible else held
    if tres == "node":
        each = max(job.gpus_per_node_held.values(), default=1)
        return ceil(gpus / each)
    return ceil(gpus * _per_gpu(tres, job))


def _by_turns(
    jobs: Iterable[SlurmJob], holding: Mapping[int, int], places: int, rule: str
) -> dict[int, Eligibility]:
    """Jobs that get no place of a limit on running jobs."""
    found: dict[int, Eligibility] = {}
    jobs = list(jobs)
    places -= sum(1 + len(job.companions) for job in jobs if holding[job.job_id])
    eligible = Eligibility(frozenset(), f"{rule} is reached")
    if places < 0:
        return {job.job_id: eligible for job in jobs}
    for job in jobs:
        if not holding[job.job_id]:
            places -= 1
            if places < 0:
                found[job.job_id] = eligible
    return found


def _array_turns(ours: Iterable[SlurmJob], holding: Mapping[int, int]) -> dict[int, Eligibility]:
    """Tasks of an array that wait for others of it (`--array=0-11%4`)."""
    arrays: dict[tuple[int, int], list[SlurmJob]] = defaultdict(list)
    for job in ours:
        if job.array is not None and job.demands.array_limit is not None:
            arrays[job.array[0], job.demands.array_limit].append(job)
    found: dict[int, Eligibility] = {}
    for (number, limit), jobs in arrays.items():
        jobs.sort(key=lambda job: job.array or (0, 0))
        found |= _by_turns(jobs, holding, limit, f"the limit of {limit} running tasks of array {number}")
    return found


def _unlicensed(
    ours: Iterable[SlurmJob], holding: Mapping[int, int], state: ClusterState
) -> dict[int, Eligibility]:
    """Waiting jobs whose licenses are in use, and running ones that would lose theirs at a restart."""
    free = dict(state.rules.licenses)
    wanted = Counter[str]()
    for job in state.jobs:
        if job.state is JobState.PENDING and not job.held_by_user and not job.dependent:
            wanted.update(job.licenses)
    found: dict[int, Eligibility] = {}
    for job in ours:
        if job.state is not JobState.PENDING:
            lost = [name for name in job.licenses if name in free and free[name] < wanted[name]]
            if lost:
                rule = f"a waiting job wants license {lost[0]}, which it would lose"
                found[job.job_id] = Eligibility(frozenset(), rule)
            continue
        short = [name for name, count in job.licenses.items() if count > free.get(name, count)]
        if short and not holding[job.job_id]:
            found[job.job_id] = Eligibility(frozenset(), f"license {short[0]} is in use")
            continue
        for name, count in job.licenses.items():
            free[name] = free.get(name, count) - count
    return found
