"""Bound the protection that users give their own jobs.

polluxd does not move some jobs: a job on hold would not start again, one without a training step could lose its work,
`preemptible=no` says so, an hour's restarts are used up. A user causes each of these, also after a job has grown over
the whole cluster. So such a reason protects no more than the user's equal share of the GPUs while another user's job
lacks GPUs. polluxd then asks the job once, like any other, to give the rest back, and requeues it if need be. All
functions here are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from polluxd.apply.own_rhythm import OwnRhythm, due_at
from polluxd.apply.placed import OVERRUN_S, ends_at
from polluxd.apply.startable import Eligibility
from polluxd.config.settings import MoveSettings
from polluxd.model import JobState, Report, Step
from polluxd.slurm.protocol import ClusterState, SlurmJob
from polluxd.store import CycleRecords

LAST_S = 120.0
"""Time that a training has left below which it is not moved: a joiner alone may take that long to start [s]."""
MOST_ASKED = 10
"""Sets of nodes that one user's jobs ask for: each is compared with all jobs that hold GPUs."""


class Stay(NamedTuple):
    """Why a running job is to stay where it is."""

    reason: str
    of_user: bool
    """The job's user can cause it."""


def stay(
    job: SlurmJob,
    report: Report | None,
    spent: str,
    now: float,
    stepped: Mapping[int, int],
    rhythm: Mapping[int, str],
    undrained: int = 0,
) -> Stay | None:
    """Return why a running job is to stay where it is, by what Slurm, its user or its agent say; None: it may move.

    Args:
        report: its newest.
        spent: why no job of its user may be restarted now.
        stepped: by job, the newest attempt whose training steps polluxd has seen.
        rhythm: by job, why it stays for the sake of its trainer's own rhythm (`own_rhythm`).
        undrained: orders to drain that its agent refused, or left unanswered.
    """
    assert job.spec is not None
    if (end := ends_at(job)) is not None and -OVERRUN_S < (left := end - now) < LAST_S:
        # In the last seconds, what it gives back would come free no sooner.
        why = f"its time limit ends in {max(left, 0.0):.0f} s: no move would pay"
        return Stay(why, of_user=left > LAST_S / 4)
    if spent:
        return Stay(spent, of_user=True)
    if job.held_by_user:
        return Stay("on hold (scontrol hold): it would not start again", of_user=True)
    if job.deadline is not None:
        # A user cannot change it: the submission hook keeps it for administrators.
        return Stay("has a deadline (--deadline), by which Slurm could end it during a move", of_user=False)
    if not job.spec.preemptible:
        return Stay("not preemptible (preemptible=no)", of_user=True)
    if report is not None and report.attempt == job.restart_count and report.immovable:
        return Stay(f"cannot be moved: {report.immovable}", of_user=True)
    seen = report is not None and report.attempt == job.restart_count and report.first_step_at is not None
    if not (seen or stepped.get(job.job_id) == job.restart_count):
        return Stay(
            "has not reported a training step since it started: moving it could lose its work", of_user=True
        )
    if undrained and not (report is not None and report.checkpointed):
        why = "its agent left an order to drain undone, and it has no checkpoint: it is not asked again before it has"
        return Stay(why, of_user=True)
    return Stay(rhythm[job.job_id], of_user=True) if job.job_id in rhythm else None


class Protection:
    """What polluxd has seen of attempts itself, and which jobs protection leaves less than they hold."""

    def __init__(self, limits: MoveSettings) -> None:
        self.rhythm = OwnRhythm(limits)
        self.stepped: dict[int, int] = {}
        """The newest attempt of each job whose training steps polluxd has seen: no later report takes it back."""
        self.start_s: dict[int, float] = {}
        """Of trainers with loops of their own: from Slurm's start to the first step, as polluxd first heard of it."""
        self.beyond: dict[int, int] = {}
        """As `beyond_share` gives it, by the newest decision."""
        self.least: dict[int, int] = {}
        """Fewest GPUs of trainers, as `OwnRhythm` has them, where the equal share has room for them."""

    def observe(
        self,
        state: ClusterState,
        records: CycleRecords,
        eligibility: Mapping[int, Eligibility],
        spent: Callable[[str], str],
        undrained: Callable[[int], int] = lambda _job_id: 0,
    ) -> None:
        """Take in what a decision is made on; the arguments are as in `stay` and `beyond_share`."""
        reports, now = records.reports, state.taken_at
        self.rhythm.observe(state, records)
        ours = {job.job_id: job for job in state.jobs if job.spec is not None and not job.state.finished}
        for job_id, job in ours.items():
            report = reports.get(job_id)
            if report is None or report.attempt != job.restart_count or report.first_step_at is None:
                continue
            if self.stepped.get(job_id) != report.attempt and report.next_save_s is not None:
                first = min(report.first_step_at, state.taken_at)
                self.start_s[job_id] = max(first - (job.start_time or first), 0.0)
            self.stepped[job_id] = report.attempt
        self.stepped = {job_id: attempt for job_id, attempt in self.stepped.items() if job_id in ours}
        self.start_s = {job_id: seconds for job_id, seconds in self.start_s.items() if job_id in ours}
        aside = _set_aside(ours, records)
        protected = dict.fromkeys(self.rhythm.least, 1) | dict.fromkeys(aside, 0)
        for job_id, job in ours.items():
            if job.state is JobState.RUNNING:
                report, stays = reports.get(job_id), self.rhythm.stays
                staying = stay(job, report, spent(job.user), now, self.stepped, stays)
                # A drain refused is as much its own act as a hold.
                if undrained(job_id) or _of_user(job, staying, eligibility.get(job_id)):
                    protected[job_id] = 0
        state = replace(state, jobs=tuple((ours | aside).values()))
        found = beyond_share(state, protected, eligibility) if protected else {}
        self.beyond = {job_id: gpus for job_id, gpus in found.items() if not protected[job_id]}
        self.least = {n: gpus for n, gpus in self.rhythm.least.items() if gpus <= found.get(n, gpus)}


def _of_user(job: SlurmJob, staying: Stay | None, eligible: Eligibility | None) -> bool:
    if staying is not None:
        return staying.of_user
    return eligible is not None and not eligible.nodes.issuperset(job.gpus_per_node_held)


def _set_aside(jobs: Mapping[int, SlurmJob], records: CycleRecords) -> dict[int, SlurmJob]:
    """Return those that drain until their trainers' own checkpoints, as holding what is set aside for them, too."""
    found = {}
    for move in records.moves:
        job, own = jobs.get(move.job_id), due_at(records.reports.get(move.job_id), move.attempt)
        if job is not None and own is not None and move.step is Step.DRAINING:
            more = Counter(dict.fromkeys(move.target.nodes, move.target.gpus_per_node))
            found[job.job_id] = replace(job, gpus_per_node_held=Counter(job.gpus_per_node_held) | more)
    return found


def beyond_share(
    state: ClusterState, protected: Mapping[int, int], eligibility: Mapping[int, Eligibility]
) -> dict[int, int]:
    """Return, by job, how many GPUs protection leaves it; jobs that it leaves all are left out.

    The share is one of the GPUs that others could have, of a partition or a type: the rest of the cluster is none to
    them. It is a GPU at least.

    Args:
        state: of jobs, those of Pollux that have not ended, with all that they keep from others.
        protected: running jobs that stay for a reason that their users can cause (0), or at their sizes (1): in what
            the former leave of the share.
        eligibility: where jobs may start that Slurm restricts. A job that may start nowhere lacks no GPUs.
    """
    asked, found = _asked(state, eligibility), dict[int, int]()
    holding = [job for job in state.jobs if job.gpus_per_node_held]
    # The smallest first: they are the most that a share has room for.
    holding.sort(key=lambda j: (protected.get(j.job_id, 0), _on(None, j), j.job_id))
    for nodes, users in asked.items():
        held = Counter[int]()
        for job in holding:
            held[job.uid] += _on(nodes, job)
        sharers = {uid for others, uids in asked.items() if others & nodes for uid in uids} | (+held).keys()
        share = max(sum(node.capacity for node in state.nodes if node.name in nodes) / len(sharers), 1.0)
        lacking = {uid for uid in users if held[uid] + 1 <= share}
        left = dict.fromkeys(held, int(share))
        for job in holding:
            if job.job_id in protected:
                own = _on(nodes, job)
                keeps = min(own, left[job.uid])
                left[job.uid] -= keeps
                if keeps < own and lacking - {job.uid}:
                    most = _on(None, job) - (own - keeps)
                    found[job.job_id] = min(most, found.get(job.job_id, most))
    return found


def _on(nodes: Collection[str] | None, job: SlurmJob) -> int:
    """GPUs that the job holds on these nodes; None: on all."""
    return sum(gpus for name, gpus in job.gpus_per_node_held.items() if nodes is None or name in nodes)


def _asked(state: ClusterState, eligibility: Mapping[int, Eligibility]) -> dict[frozenset[str], set[int]]:
    """Return the users with jobs that could take more GPUs, by nodes: of a partition, and of a GPU type in it."""
    reach = {partition: state.reach(partition) for partition in {job.partition for job in state.jobs}}
    types = {node.name: node.gpu_type for node in state.nodes}
    found, number = dict[frozenset[str], set[int]](), Counter[int]()
    for job in state.jobs:
        whole, eligible = reach[job.partition], eligibility.get(job.job_id)
        # Whoever names nodes asks for all of their type: they could be those of one other user.
        kinds = {types.get(name) for name in (whole if eligible is None else whole & eligible.nodes)}
        if not kinds or not _asks(job, state.taken_at):
            continue
        own = frozenset(name for name in whole if types.get(name) in kinds)
        for nodes in {whole, own}:
            if nodes in found or number[job.uid] < MOST_ASKED:
                number[job.uid] += nodes not in found
                found.setdefault(nodes, set()).add(job.uid)
    return found


def _asks(job: SlurmJob, now: float) -> bool:
    if job.kept_back(now) or job.tasks or job.spec is None:
        return False
    most, own = job.spec.max_gpus, sum(job.gpus_per_node_held.values())
    return job.state is JobState.PENDING or (job.state is JobState.RUNNING and (most is None or own < most))
