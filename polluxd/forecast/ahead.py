"""One course of the cluster: the policy decides on its own snapshot, aged in virtual time. Pure.

The picture is the snapshot of a real decision, and `polluxd.policy.decide` changes it as it would change the cluster.
What a course leaves out, since no snapshot has it: the ends of plain jobs (they keep their GPUs), refusals of Slurm,
the restart budget and failures of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pollux.goodput import Goodput
from pollux.parameters import NoiseScale
from polluxd.model import NO_PLACEMENT, Placement, Report, Snapshot, SnapshotJob
from polluxd.policy import Cache, decide

INTERVAL_S, FLOOR_S = 60.0, 20.0
"""Seconds between two decisions at the beginning of a course; and between two where jobs came or ended."""
THINNER, THINNER_FLOOR = 0.1, 0.03
"""At time t, these shares of t are added to them: what lies further ahead is known less, and takes fewer decisions."""
NEWS_S = 30.0
"""From a job's first step at a new size until its agent has measured it there."""
SOON = ("move to ", "left alone for ")
"""Reasons of pins that end by themselves within minutes (`polluxd.cycle.snapshot`). Other pins stay."""


@dataclass(frozen=True, slots=True)
class Work:
    """The rest of a job, as drawn."""

    amount: float
    """Scale-invariant steps; or seconds from its first start on any GPUs, with starts and moves in them."""
    in_steps: bool
    measures: Report | None = None
    """What the agent will report of a job that has not reported yet; None: nothing."""
    limit_s: float = math.inf
    """Seconds on GPUs until Slurm's time limit ends it."""
    ends_with: NoiseScale | None = None
    """The noise of a past job of its kind at its end; as noise grows, so does speed on many GPUs. None: it stays."""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A job that is submitted `after` so many seconds, as drawn."""

    after: float
    job: SnapshotJob
    work: Work


@dataclass(frozen=True, slots=True)
class Course:
    """What became of a job, in seconds after the snapshot; None: not within the look-ahead."""

    starts: float | None
    ends: float | None


def look_ahead(
    snapshot: Snapshot,
    work: Mapping[int, Work],
    arrivals: Sequence[Newcomer] = (),
    *,
    horizon_s: float,
    drains: Mapping[str, float] | None = None,
) -> dict[int, Course]:
    """Run one course; return what became of the jobs of the snapshot.

    Args:
        work: of each job of the snapshot.
        arrivals: in order of time; their job ids are new.
        drains: seconds after which a node takes no job any more.
    """
    return _Course(snapshot, work, arrivals, horizon_s, drains or {}).run()


class _Life:
    """One job in the course."""

    def __init__(self, job: SnapshotJob, work: Work) -> None:
        self.job, self.work = job, work
        self.left, self.limit_left = work.amount, work.limit_s
        self.speed = 0.0
        self.began = 0.0 if job.placement else None
        self.free_at = 0.0
        """When the policy may move it again."""
        self.trains_at = 0.0
        self.news_at = math.inf
        if job.placement and job.pinned and job.pin_reason.startswith(SOON):
            self.free_at = _cost(job, NO_PLACEMENT if job.resize_cost is None else job.placement)
            self.trains_at = self.free_at * work.in_steps

    def ends_after(self, now: float) -> float:
        """When it ends at its present speed."""
        if not self.job.placement:
            return math.inf
        pause = max(self.trains_at - now, 0.0)
        trained = self.left / self.speed if self.speed > 0 else math.inf
        return now + min(pause + trained, self.limit_left)

    def live(self, now: float, seconds: float) -> None:
        if self.job.placement:
            self.limit_left -= seconds
            self.left -= self.speed * max(seconds - max(self.trains_at - now, 0.0), 0.0)

    def noise(self, known: NoiseScale | None) -> NoiseScale | None:
        """The noise now: on its way from the known one to that of the end, geometric as in the paper (figure 2)."""
        end = self.work.ends_with
        if known is None or end is None or min(*known, *end) <= 0:
            return known
        done = min(max(1.0 - self.left / self.work.amount, 0.0), 1.0)
        return NoiseScale(*(now ** (1.0 - done) * then**done for now, then in zip(known, end, strict=True)))

    def over(self) -> bool:
        return bool(self.job.placement) and (self.left <= 1e-9 * self.work.amount or self.limit_left <= 1e-6)


class _Course:
    def __init__(
        self,
        snapshot: Snapshot,
        work: Mapping[int, Work],
        arrivals: Sequence[Newcomer],
        horizon_s: float,
        drains: Mapping[str, float],
    ) -> None:
        self._snapshot, self._horizon, self._drains = snapshot, horizon_s, drains
        self._kinds = {node.name: node.gpu_type for node in snapshot.nodes}
        self._racks = {node.name: node.rack or node.name for node in snapshot.nodes}
        self._racked = any(node.rack for node in snapshot.nodes)
        self._now, self._decided_at, self._happened = 0.0, 0.0, False
        self._arrivals = list(arrivals)
        self._lives = {job.job_id: _Life(job, work[job.job_id]) for job in snapshot.jobs}
        self._asked = set(self._lives)
        self._found: dict[int, Course] = {}
        self._cache = Cache()
        for life in self._lives.values():
            self._pace(life)

    def run(self) -> dict[int, Course]:
        self._decide()
        while self._asked - self._found.keys() and self._now < self._horizon:
            upcoming = min(self._next(), self._horizon)
            for life in self._lives.values():
                life.live(self._now, upcoming - self._now)
            self._now = upcoming
            self._pass()
            if self._now >= self._due() - 1e-6:
                self._decide()
        ongoing = {job: Course(self._lives[job].began, None) for job in self._asked - self._found.keys()}
        return {job: course for job, course in (self._found | ongoing).items() if job in self._asked}

    def _due(self) -> float:
        """When the next decision is due."""
        first, share = (FLOOR_S, THINNER_FLOOR) if self._happened else (INTERVAL_S, THINNER)
        return self._decided_at + first + share * self._decided_at

    def _next(self) -> float:
        """When something happens next."""
        lives = self._lives.values()
        ahead = [
            self._due(),
            *(life.ends_after(self._now) for life in lives),
            *(life.news_at for life in lives),
        ]
        ahead += [at for at in self._drains.values() if at > self._now]
        if self._arrivals:
            ahead.append(self._arrivals[0].after)
        return max(min(ahead), self._now + 1e-3)

    def _pass(self) -> None:
        """Let jobs end and come, and agents report."""
        for number in [number for number, life in self._lives.items() if life.over()]:
            life = self._lives.pop(number)
            self._found[number] = Course(life.began, self._now)
            self._happened = True
        while self._arrivals and self._arrivals[0].after <= self._now:
            arrival = self._arrivals.pop(0)
            self._lives[arrival.job.job_id] = _Life(arrival.job, arrival.work)
            self._happened = True
        for life in self._lives.values():
            if life.news_at <= self._now:
                life.news_at = math.inf
                life.job = replace(life.job, report=_measured(life, self._snapshot.taken_at + self._now))
                self._pace(life)
        self._happened |= any(self._decided_at < at <= self._now for at in self._drains.values())

    def _decide(self) -> None:
        now = self._now
        jobs = tuple(self._shown(life) for _, life in sorted(self._lives.items()))
        closed = {name for name, at in self._drains.items() if at <= now}
        nodes = self._snapshot.nodes
        if closed:
            nodes = tuple(replace(n, schedulable=n.schedulable and n.name not in closed) for n in nodes)
        snapshot = replace(self._snapshot, taken_at=self._snapshot.taken_at + now, nodes=nodes, jobs=jobs)
        for allocation in decide(snapshot, cache=self._cache, explained=False).allocations:
            life = self._lives[allocation.job_id]
            if allocation.placement != life.job.placement:
                self._move(life, allocation.placement)
            elif life.work.ends_with is not None:
                self._pace(life)
        self._decided_at, self._happened = now, False

    def _shown(self, life: _Life) -> SnapshotJob:
        """The job as the policy sees it now."""
        job, report, now = life.job, life.job.report, self._now
        age = self._snapshot.taken_at + now - job.submitted_at
        if report is not None and life.work.in_steps:
            done = max(life.work.amount - life.left, 0.0)
            report = replace(report, progress=report.progress + done, noise=life.noise(report.noise))
        pinned = job.pinned and not job.pin_reason.startswith(SOON)
        waiting = None if job.waiting is None or job.placement else job.waiting + now - self._decided_at
        if not pinned and life.free_at > now and job.placement:
            job = replace(job, pinned=True, pin_reason="moved")
        else:
            job = replace(job, pinned=pinned, pin_reason=job.pin_reason if pinned else "")
        life.job = replace(life.job, waiting=waiting)
        return replace(job, age=max(age, 0.0), waiting=waiting, report=report)

    def _move(self, life: _Life, target: Placement) -> None:
        job, now = life.job, self._now
        if not target:
            life.job = replace(job, placement=target, waiting=0.0, keeps=())
            return
        cost = _cost(job, target)
        moved = job.started
        keeps = target.nodes if job.resize_cost is not None and len(target.nodes) > 1 else ()
        life.job = replace(
            job,
            placement=target,
            started=True,
            waiting=None,
            keeps=keeps,
            moves=job.moves + moved,
            lost_seconds=job.lost_seconds + cost * moved,
        )
        if moved and not _resized(job, target) and job.time_limit is not None:
            life.limit_left = job.time_limit
        life.began = now if life.began is None else life.began
        life.trains_at, life.free_at = now + cost * life.work.in_steps, now + 2 * cost
        life.news_at = now + cost + NEWS_S
        self._pace(life)

    def _pace(self, life: _Life) -> None:
        """Set the job's speed where it is, in units of its work per second."""
        held, report = life.job.placement, life.job.report or life.work.measures
        if not held or not life.work.in_steps or report is None or report.params is None:
            life.speed = 1.0
            return
        report = replace(report, noise=life.noise(report.noise))
        racks = len({self._racks[name] for name in held.nodes}) if self._racked else 1
        life.speed = min(
            _goodput(report, kind, len(held.nodes), held.gpus, racks, adaptive=life.job.spec.adaptive)
            for kind in {self._kinds.get(name, "") for name in held.nodes}
        )


def _goodput(report: Report, kind: str, nodes: int, gpus: int, racks: int, *, adaptive: bool) -> float:
    """Return the steps per second there, by the job's own fit."""
    params = report.params_by_type.get(kind, report.params)
    assert params is not None
    limits = report.limits_on(kind)
    model = Goodput(params, report.noise, limits, adaptive)
    found = model.best(nodes, gpus)[2] if racks == 1 else float(model.optimize(nodes, gpus, racks).goodput)
    return found / limits.initial


def _resized(job: SnapshotJob, target: Placement) -> bool:
    """Whether the job goes there in place."""
    here = job.placement
    if job.resize_cost is None or not here or here.gpus_per_node != target.gpus_per_node:
        return False
    one, other = set(here.nodes), set(target.nodes)
    return one <= other or (other <= one and set(job.keeps[: len(other)]) == other)


def _cost(job: SnapshotJob, target: Placement) -> float:
    """What the move is expected to cost [s]."""
    return job.resize_cost if job.resize_cost is not None and _resized(job, target) else job.move_cost


def _measured(life: _Life, at: float) -> Report | None:
    """What the agent reports once the job has trained where it is."""
    job, known = life.job, life.job.report or life.work.measures
    if known is None:
        return None
    first = job.report is None
    return replace(
        known,
        attempt=max(known.attempt, job.attempt),
        explored_gpus=max(0 if first else known.explored_gpus, job.placement.gpus),
        explored_nodes=max(0 if first else known.explored_nodes, len(job.placement.nodes)),
        gpus=job.placement.gpus,
        first_step_at=at,
        most_gpus=None,
    )
