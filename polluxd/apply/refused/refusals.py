"""What Slurm refused, and why: the record by which polluxd stops no training twice for one cause.

No rule that polluxd knows forbade these starts. A refusal holds until its cause has changed, and no start at another
size ends it. There are two kinds of causes.

**A limit**, of the job's QOS, association, partition, licences or array. Slurm's reason says what it counts: GPUs, CPUs
or jobs, for one job or for all that share it, and whether times their time limits. Jobs that share the limit may not
start with as much as was refused. A job that trains may not go beyond what is known to work: each try would stop it.
The cause has changed when the limit's record has, or when the others that share it use less.

**Nodes**: everything else, such as `Resources` although nobody took the GPUs, or an update that scontrol refused. The
job, and those of its user with the same demands, may not start there with as many GPUs. The cause has changed when a
node has, or when one of them has started there. When others use less of it, it may have: jobs that wait try it.

The record is in memory. The moves in the database keep the reasons of refusals, so a polluxd that restarts, or takes
the lead over, reads those of a job's own moves before its first order to the job. It cannot see whether a cause has
changed until then, so these hold until their next change.

A job without GPUs has no training to stop. Where polluxd cannot see the end of a cause, such a job is tried again
after a minute, on GPUs that are free, at its least size: what still refuses a larger one may allow it. Only after an
hour do others give way for it.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil, floor, inf

from polluxd.apply.actions import JOINER_FAILED, REFUSED_SIZE, REFUSED_START, sentences
from polluxd.apply.refused.bars import Bar, Bars
from polluxd.apply.refused.causes import (
    Counted,
    counted,
    demands_of,
    held_of,
    rules_of,
    shares,
    use,
    weight,
)
from polluxd.apply.refused.refused_limits import RefusedLimit, bounded
from polluxd.apply.refused.refused_nodes import (
    RefusedNodes,
    by_nodes,
    newest_of_users,
    record_of,
    still_refused,
)
from polluxd.apply.startable import Eligibility, combined, of_limit
from polluxd.model import JobState, Move, Placement, Report, Step
from polluxd.slurm.protocol import ClusterState, SlurmJob

TRIED_AGAIN_S, AS_OTHERS_S = 60.0, 3600.0
"""A job without GPUs is tried again after these times, should polluxd not see the cause's end: on free GPUs, and then
on those of others, who stand for a start that Slurm may refuse."""
STUCK = "stuck since "
"""What the note of a cycle begins with while Slurm refuses to start jobs; the time follows."""

BARRED = "sizes that Slurm refused stay barred: "

_OWN = re.compile(r"Per(Job|Node|User)|Wall|PartitionTime|PartitionNode|AssocMaxJobs")
_REFUSED = re.compile(rf"(?:{REFUSED_START}|{REFUSED_SIZE}): (.*)")
_AMOUNTS = 8
"""Most refused amounts of one limit that are kept."""


class Refusals:
    """What Slurm has refused, and has not been seen to allow since."""

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._limits: dict[Counted, RefusedLimit] = {}
        self._nodes: dict[tuple[int, Placement], RefusedNodes] = {}
        self._spans: dict[int, tuple[int, str]] = {}
        """By job: the most nodes that its script runs on, and why."""
        self._state: ClusterState | None = None
        self._reports: Mapping[int, Report] = {}
        self._coming: dict[int, Placement] = {}
        """What jobs with an open move past its plan will hold."""
        self._moved: frozenset[int] = frozenset()
        """Of these, jobs that trained before it."""
        self._busy: set[Counted] = set()
        """Limits that one of them has to meet: who is tried beyond them now would take its part."""
        self._learnt: dict[int, set[int]] = {}
        """By job: the moves that this process has seen fail."""

    def observe(
        self, state: ClusterState, moves: Iterable[Move] = (), reports: Mapping[int, Report] | None = None
    ) -> None:
        """Take in the cluster and the open moves; forget refusals whose cause has changed, or that no job can meet."""
        self._state, self._reports = state, reports or {}
        self._follow([move for move in moves if move.step is not Step.PLANNED])
        jobs = {job.job_id: job for job in state.jobs if job.spec is not None and not job.state.finished}
        self._limits = {
            key: limit
            for key, limit in self._limits.items()
            if limit.record == rules_of(state, limit.job)
            and any(shares(job, key) for job in jobs.values())
            and not (key.alone and dict(key.shared).get("job") and limit.job.job_id not in jobs)
        }
        for limit in self._limits.values():
            limit.met = {job_id: user for job_id, user in limit.met.items() if job_id in jobs}
        self._spans = {job_id: span for job_id, span in self._spans.items() if job_id in jobs}
        self._learnt = {job_id: moves for job_id, moves in self._learnt.items() if job_id in jobs}
        refused = {
            key: one
            for key, one in self._nodes.items()
            if one.job_id in jobs and still_refused(one, state, jobs[one.job_id], self._monotonic())
        }
        self._nodes = newest_of_users(refused, lambda one: jobs[one.job_id].user)
        self._limits = bounded(self._limits)

    def _follow(self, begun: Sequence[Move]) -> None:
        self._coming = {move.job_id: move.target for move in begun}
        self._moved = frozenset(move.job_id for move in begun if move.source)

    def learn(self, move: Move, job: SlurmJob, reason: str) -> None:
        """Take in that Slurm did not start the job at the target of the move."""
        assert self._state is not None
        # As it was observed: what was read of the job alone lacks the site's defaults, and would look changed.
        job = next((one for one in self._state.jobs if one.job_id == job.job_id), job)
        self._learnt.setdefault(job.job_id, set()).add(move.id)
        if of_limit(reason):
            self._learn_limit(move, job, reason, self._state)
            return
        target = move.added if move.in_allocation else move.target
        # Slurm, or a hook, refuses an update whoever uses the nodes now.
        updated = Step.CONFIGURED not in move.times
        self._nodes[job.job_id, target] = RefusedNodes(
            reason,
            self._clock(),
            self._monotonic(),
            job.job_id,
            job.user,
            target,
            demands_of(job),
            record_of(self._state, job, target, updated=updated),
            () if updated else tuple(use(self._state, target, job.job_id)),
            updated,
            had=move.source.gpus if move.path == "requeue" else 0,
        )

    @property
    def unwritten(self) -> list[int]:
        """Waiting jobs that have the size that their users asked for, where not even this may be written."""
        refused = {(one.job_id, one.target.gpus) for one in self._nodes.values() if one.updated}
        jobs = self._state.jobs if refused and self._state is not None else ()
        return [
            job.job_id
            for job in jobs
            if job.state is JobState.PENDING
            and (asked := job.demands.asked) is not None
            and job.requested_gpus_per_node == asked[1]
            and (job.job_id, asked[0] * asked[1]) in refused
        ]

    def cannot_span(self, move: Move, reason: str) -> None:
        """Take in that the job's script failed on nodes beyond those that it trains on."""
        self._learnt.setdefault(move.job_id, set()).add(move.id)
        self._spans[move.job_id] = len(move.source.nodes), reason

    def recall(self, move: Move, job: SlurmJob, past: Iterable[Move]) -> str:
        """Take in what a former polluxd was refused for the job; return why the move is barred, else an empty text.

        Args:
            past: all moves of the job.
        """
        assert self._state is not None
        for one in past:
            if one.step is not Step.FAILED or one.id in self._learnt.get(job.job_id, ()):
                continue
            if found := next(filter(None, map(_REFUSED.match, sentences(one.detail))), None):
                self.learn(one, job, found[1])
            elif JOINER_FAILED in one.detail:
                self.cannot_span(one, one.detail)
        return self.bars(self._state, {job.job_id}).forbids(move)

    def cannot_be_changed(self, job: SlurmJob, reason: str) -> None:
        """Take in that Slurm, or a hook of the site, does not let polluxd change the job."""
        assert self._state is not None
        key = Counted((("job", str(job.job_id)),), "orders", minutes=False, alone=True)
        now = self._monotonic()
        self._limits[key] = RefusedLimit(
            reason,
            self._clock(),
            now,
            job,
            (0.0,),
            0.0,
            rules_of(self._state, job),
            met={job.job_id: job.user},
        )

    def _learn_limit(self, move: Move, job: SlurmJob, reason: str, state: ClusterState) -> None:
        key = counted(job, reason)
        others = self._used(key, job.job_id, state)
        least = others + weight(job, move.target.gpus, len(move.target.nodes), key, state.taken_at)
        if move.in_allocation and key.unit == "jobs":
            least += 1  # the companion is one more
        if key.minutes:
            # What runs uses less with each minute, which is no reason to try again within one.
            least -= self._used(key._replace(minutes=False), job.job_id, state)
        good = 0.0
        if move.source and key.unit != "jobs":
            # What worked before this refusal says nothing: the limit may have been lowered where polluxd cannot see it.
            beside = self._used(key, job.job_id, state, before=move.times.get(Step.CHECKPOINTED, inf))
            good = beside + weight(job, move.source.gpus, len(move.source.nodes), key, state.taken_at)
        known = self._limits.get(key)
        amounts = {least, *(known.amounts if known is not None else ())}
        least = min(amounts)
        since = self._clock() if known is None else known.since
        stopped = bool(move.source) or (known is not None and known.stopped)
        met = {} if known is None else known.met
        self._limits[key] = RefusedLimit(
            reason,
            since,
            self._monotonic(),
            job,
            tuple(sorted(amounts))[:_AMOUNTS],
            good if good < least else 0.0,
            rules_of(state, job),
            stopped,
            {**met, job.job_id: job.user},
        )

    def works(self, move: Move, job: SlurmJob) -> None:
        """Take in that Slurm started the job at the target of the move: what is no larger is barred no more."""
        assert self._state is not None
        started = move.added if move.in_allocation else move.target
        self._nodes = {key: one for key, one in self._nodes.items() if not one.works(started, job)}
        for key, limit in list(self._limits.items()):
            if not shares(job, key) or key.unit == "orders":
                continue
            now = weight(job, move.target.gpus, len(move.target.nodes), key, self._state.taken_at)
            now += self._used(key, job.job_id, self._state)
            limit.good = max(limit.good, now)
            limit.amounts = tuple(amount for amount in limit.amounts if amount > now)
            if not limit.amounts:
                del self._limits[key]  # it is not what polluxd took it for

    def _used(self, key: Counted, but: int, state: ClusterState, *, before: float = inf) -> float:
        """What other jobs use of the limit that have started before a time."""
        return sum(
            held_of(job, key, state)
            for job in state.jobs
            if not key.alone and job.job_id != but and (job.start_time or 0.0) <= before and shares(job, key)
        )

    def _promised(self, job: SlurmJob, key: Counted, state: ClusterState) -> float:
        """What the job uses of the limit, or will once its move has ended: of two, the larger."""
        coming, holds = self._coming.get(job.job_id), held_of(job, key, state)
        if not coming or job.state.finished:
            return holds
        return max(holds, weight(job, coming.gpus, len(coming.nodes), key, state.taken_at))

    # -- what it bars ----------------------------------------------------------------------------------------

    def begins(self, move: Move) -> None:
        """Take in that the move is past its plan: what limits leave to others is less by its target."""
        self._coming[move.job_id] = move.target

    def bars(self, state: ClusterState, of: Container[int] | None = None) -> Bars:
        """Return what is barred now to each job, or to each `of` some."""
        most: dict[int, tuple[int, str]] = {}
        found: dict[int, Eligibility] = {}
        if not (self._limits or self._nodes or self._spans):
            return Bars()
        gpus = {node.name: node.gpus for node in state.nodes}
        used = self._uses(state)
        free = Counter({node.name: node.capacity for node in state.nodes})
        for job in state.jobs:
            free.subtract(job.gpus_per_node_held if job.spec is not None else {})
        spans: dict[int, int] = {}
        for job in state.jobs:
            if job.spec is None or job.state.finished or job.tasks or (of and job.job_id not in of):
                continue
            met = list(self._met(job, state, used, +free))
            if (span := self._span(job, state, used)) is not None:
                spans[job.job_id] = span[0]
                largest = max((gpus.get(name, 0) for name in state.reach(job.partition)), default=0)
                met.append(((span[0] * largest, span[1]), None))
            for cap, eligible in met:
                if cap is not None and cap[0] < most.get(job.job_id, (inf, ""))[0]:
                    most[job.job_id] = cap
                if eligible is not None:
                    found = combined(found, {job.job_id: eligible})
        return Bars(most, spans, found)

    def _uses(self, state: ClusterState) -> dict[Counted, float]:
        """What jobs use of each limit, or will once their moves have ended."""
        moved = [job for job in state.jobs if job.job_id in self._moved]
        self._busy = {key for key in self._limits if any(shares(job, key) for job in moved)}
        return {
            key: sum(
                self._promised(job, key, state) for job in state.jobs if not key.alone and shares(job, key)
            )
            for key in self._limits
        }

    def _span(
        self, job: SlurmJob, state: ClusterState, used: Mapping[Counted, float]
    ) -> tuple[int, str] | None:
        """Return the most nodes of the job, and why; None: any number."""
        found = []
        if (known := self._spans.get(job.job_id)) is not None:
            found.append((known[0], f"its script's failure on a further node ({known[1]})"))
        for key, limit in self._limits.items():
            again = not job.gpus_per_node_held and self._monotonic() - limit.tried_at >= TRIED_AGAIN_S
            if key.unit != "node" or not shares(job, key) or again:
                continue
            own = 0.0 if key.alone else self._promised(job, key, state)
            most = self._most_nodes(job, key, limit, used[key] - own)
            if most >= 1:
                found.append((most, f"Slurm's refusal ({limit.reason})"))
        return min(found, default=None)

    def _most_nodes(self, job: SlurmJob, key: Counted, limit: RefusedLimit, others: float) -> int:
        """Return the most nodes that a limit on nodes leaves to the job."""
        assert self._state is not None
        each, holds = weight(job, 0, 1, key, self._state.taken_at), len(job.gpus_per_node_held)
        most = max(ceil((limit.refused - others) / each) - 1, 0)
        if holds and limit.stopped:
            most = min(most, max(floor((limit.good - others) / each), 0))
        return max(most, holds)

    def _met(
        self, job: SlurmJob, state: ClusterState, used: Mapping[Counted, float], free: Counter[str]
    ) -> Iterable[Bar]:
        """What each refusal means for the job; one without GPUs is tried again where enough GPUs are `free`.

        It is tried a minute later under a limit that a training in mid-move has to meet.
        """
        assert job.spec is not None
        # The sizes at which its trainer works: one of its own loop may work at its user's size alone.
        report, least = self._reports.get(job.job_id), job.spec.own_size or 1
        if report is not None:
            least = min(report.least_gpus, report.explored_gpus)
        least = max(job.spec.min_gpus, least)
        job = replace(job, spec=replace(job.spec, min_gpus=least))
        holds = sum(job.gpus_per_node_held.values())
        found: list[tuple[Bar, float]] = []
        for key, limit in self._limits.items():
            if shares(job, key):
                own = 0.0 if key.alone else self._promised(job, key, state)
                bar = self._by_limit(job, holds, key, limit, used[key] - own, state.taken_at)
                found.append((bar, limit.tried_at + TRIED_AGAIN_S * (key in self._busy)))
        demands = demands_of(job) if self._nodes else ()
        found += [
            (by_nodes(job, holds, one, state), one.tried_at)
            for one in self._nodes.values()
            if one.demands == demands and one.user == job.user
        ]
        room, idle = sum(free[name] for name in state.reach(job.partition)), frozenset(free)
        others = idle.intersection(*(one.nodes for (_, one), _ in found if one is not None and one.nodes))
        for (cap, eligible), tried_at in found:
            # Nodes that refused it rest for longer than a limit, while others have not.
            rests = TRIED_AGAIN_S * (2 if eligible is not None and others & eligible.nodes else 1)
            since = self._monotonic() - tried_at
            if holds or since < rests:
                yield cap, eligible
            elif eligible is not None and since < AS_OTHERS_S:
                where = idle if room >= least else frozenset()
                yield cap, Eligibility(where, f"{eligible.rule}; it is tried again on free GPUs alone")
            elif cap is not None and since < AS_OTHERS_S:
                yield (max(cap[0], room), cap[1]), None

    def _by_limit(
        self, job: SlurmJob, holds: int, key: Counted, limit: RefusedLimit, others: float, now: float
    ) -> Bar:
        assert job.spec is not None
        rule = f"Slurm refused it ({limit.reason})"
        if key.unit == "orders":
            return None, Eligibility(frozenset(), f"Slurm refused to change it ({limit.reason})")
        each = weight(job, 1, 1, key, now)
        if key.unit == "jobs":
            return None, None if others + each < limit.refused else Eligibility(frozenset(), rule)
        if key.unit == "node":
            most = self._most_nodes(job, key, limit, others)
            return None, None if most > 0 else Eligibility(frozenset(), rule)
        gpus = max(ceil((limit.refused - others) / each) - 1, 0)
        works = max(floor((limit.good - others) / each), 0)
        if holds and others + weight(job, holds, len(job.gpus_per_node_held), key, now) >= limit.refused:
            return None, Eligibility(frozenset(), rule)  # it would not start again at its own size, wherever
        if holds:
            # Once it has stopped a training, none goes further than what is known to work: each try may stop one more.
            gpus = max(min(gpus, works) if limit.stopped else gpus, holds)
        elif limit.stopped and key in self._busy:
            gpus = min(gpus, works)  # Slurm refuses one of the two, and that may be the training
        elif job.demands.asked is not None and works < (asked := job.demands.asked[0] * job.demands.asked[1]):
            # No try between its user's size and the refused one: each takes seconds.
            gpus = min(gpus, asked)
        bound = f"Slurm's refusal ({limit.reason})"
        if gpus < (least := max(job.spec.min_gpus, 1)):
            return (least, bound), Eligibility(frozenset(), rule)
        return (gpus, bound), None

    # -- what it tells ---------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many causes bar sizes now."""
        return len(self._limits) + len(self._nodes) + len(self._spans)

    @property
    def groups(self) -> list[str]:
        """What each group of refused jobs has in common: a field's name."""
        return [name for name, _ in self._stuck()]

    def _stuck(self) -> dict[tuple[str, str], RefusedLimit]:
        """By field and value: a limit that jobs of several users have met. One user may have met one of his own."""
        users: dict[tuple[str, str], set[str]] = {}
        found: dict[tuple[str, str], RefusedLimit] = {}
        for key, limit in self._limits.items():
            if key.shared[0][0] in ("qos", "account", "partition", "licenses") and not _OWN.search(
                limit.reason
            ):
                users.setdefault(key.shared[0], set()).update(limit.met.values())
                found[key.shared[0]] = limit
        return {group: limit for group, limit in found.items() if len(users[group]) > 1}

    def note(self) -> str:
        """Return the text for `polluxctl status`; empty without refusals."""
        told = [
            f"{STUCK}{_utc(limit.since)}: Slurm refuses to start jobs of {name} {value} ({limit.reason})"
            for (name, value), limit in sorted(self._stuck().items())
        ]
        barred = {f"{one.job_id} ({one.target}: {one.reason})" for one in self._nodes.values()}
        barred |= {f"{job_id} (more nodes: {why})" for job_id, (_, why) in self._spans.items()}
        for limit in self._limits.values():
            barred |= {f"{job_id} ({limit.reason})" for job_id in limit.met}
        if barred:
            more = f" and {len(barred) - 5} more" if len(barred) > 5 else ""
            told.append(f"{BARRED}jobs {', '.join(sorted(barred)[:5])}{more}")
        return "; ".join(told)


def _utc(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
