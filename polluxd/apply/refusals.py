"""Remember which groups of jobs Slurm refused to start.

No rule that polluxd knows forbade these starts. polluxd makes no move that would meet the same refusal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace

from polluxd.apply.headroom import Headroom
from polluxd.apply.machine import Action, Fail, Reach
from polluxd.apply.startable import Eligibility, refused_group
from polluxd.model import JobState, Move, Step
from polluxd.slurm.protocol import SlurmJob

FIRST_S = 60.0
LONGEST_S = 1800.0
"""The first refusal of a group of jobs holds the group's moves for 60 s; each following refusal doubles the time."""

_OWN = ("job", "user", "size")
"""Refusals that one user's jobs alone meet, whatever other users' jobs do."""
_Key = tuple[str, str, str]
"""Kind and name of what refused jobs have in common, and the user who met the refusal; no user: all of them."""

STUCK = "stuck since "
"""What the note of a cycle begins with while Slurm refuses to start jobs; the time follows."""


@dataclass(slots=True)
class _Refusal:
    reason: str
    since: float
    """POSIX time [s]."""
    until: float
    """By a clock that does not step."""
    times: int = 1


class Refusals:
    """Groups of jobs that Slurm refuses to start."""

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._known: dict[_Key, _Refusal] = {}
        self._throttled: dict[int, tuple[int | None, float]] = {}
        """By array: how many of its tasks Slurm lets run (None: still to be counted), and until when polluxd believes
        that."""
        self._too_large: dict[int, tuple[int, float, str]] = {}
        """By job: GPUs with which Slurm would never start it, until when polluxd believes that, and Slurm's reason."""

    def look(self, move: Move, job: SlurmJob | None, action: Action) -> None:
        """Learn whether Slurm started a job that polluxd told to start."""
        if job is None or move.step is not Step.CONFIGURED:
            return
        if isinstance(action, Fail) and job.state is JobState.PENDING:
            self._saw(move, job)
        elif isinstance(action, Reach) and action.step is Step.STARTED:
            for key in _keys(job):
                self._known.pop(key, None)

    def _saw(self, move: Move, job: SlurmJob) -> None:
        kind = refused_group(job.reason)
        if kind is None or job.reason in ("PartitionDown", "PartitionInactive"):
            return
        if kind == "licenses" and not any("@" in name for name in job.licenses):
            return  # polluxd reads each of these causes from Slurm, and so sees its end; not of a remote license
        if kind == "array":
            # Its user chose this limit, and the cluster has no problem: `note` does not name it.
            if job.array is not None:
                self._throttled[job.array[0]] = None, self._monotonic() + FIRST_S
            return
        if kind == "size":
            self._too_large[job.job_id] = move.target.gpus, self._monotonic() + LONGEST_S, job.reason
        name = _names(job)[kind]
        self._note((kind, name, job.user), job.reason)
        users = {user for *common, user in self._known if common == [kind, name]}
        if kind not in _OWN and len(users - {""}) > 1:
            # The refusal is none of one user's own association, threshold or licence.
            self._note((kind, name, ""), job.reason)

    def of_job(self, job: SlurmJob, reason: str) -> None:
        """Take in that Slurm took no geometry for the job, whatever its reason."""
        self._note(("job", str(job.job_id), job.user), reason)

    def _note(self, key: _Key, reason: str) -> None:
        known, now = self._known.get(key), self._monotonic()
        if known is None:
            self._known[key] = _Refusal(reason, self._clock(), now + FIRST_S)
        elif now >= known.until:
            known.times += 1
            known.reason = reason
            known.until = now + min(LONGEST_S, FIRST_S * 2.0 ** min(known.times - 1, 16))

    def eligibility(self, jobs: Iterable[SlurmJob]) -> dict[int, Eligibility]:
        """Return, for each job that would meet a refusal now, that no node is allowed until polluxd tries again."""
        now = self._monotonic()
        closed = {key: r for key, r in self._known.items() if now < r.until}
        jobs = tuple(jobs)
        found = self._waiting_tasks(jobs) if self._throttled else {}
        if not closed:
            return found
        for job in jobs:
            met = [closed[key] for key in _keys(job) if key in closed] if job.spec is not None else []
            if met:
                left = met[0].until - now
                rule = (
                    f"Slurm refuses to start such jobs ({met[0].reason}); polluxd tries again in {left:.0f} s"
                )
                found[job.job_id] = Eligibility(frozenset(), rule)
        return found

    def _waiting_tasks(self, jobs: Iterable[SlurmJob]) -> dict[int, Eligibility]:
        """Return the eligibility for each task that its array's throttle keeps waiting."""
        now, found = self._monotonic(), dict[int, Eligibility]()
        self._throttled = {number: known for number, known in self._throttled.items() if now < known[1]}
        tasks = sorted(
            (job for job in jobs if job.spec is not None and job.array and job.array[0] in self._throttled),
            key=lambda job: job.array or (0, 0),
        )
        for number, (limit, until) in self._throttled.items():
            own = [job for job in tasks if job.array and job.array[0] == number and not job.state.finished]
            running = sum(job.state is not JobState.PENDING for job in own)
            most = max(running, 1) if limit is None else limit
            self._throttled[number] = most, until
            rule = f"Slurm lets {most} tasks of array {number} run at a time (ArrayTaskThrottle)"
            waiting = [job for job in own if job.state is JobState.PENDING]
            for job in waiting[max(most - running, 0) :]:
                found[job.job_id] = Eligibility(frozenset(), rule)
        return found

    def keep(self, alive: Container[int]) -> None:
        """Forget the sizes of jobs that have ended."""
        self._known = {
            key: refusal
            for key, refusal in self._known.items()
            if key[0] not in ("size", "job") or int(key[1]) in alive
        }
        self._too_large = {job_id: size for job_id, size in self._too_large.items() if job_id in alive}

    def lowered(self, allowed: Headroom) -> Headroom:
        """Return the headroom without sizes that Slurm would never start."""
        now = self._monotonic()
        self._too_large = {job_id: size for job_id, size in self._too_large.items() if now < size[1]}
        most = dict(allowed.most)
        for job_id, (gpus, _, reason) in self._too_large.items():
            rule = f"Slurm could never start it with {gpus} GPUs ({reason})"
            most[job_id] = min(most.get(job_id, (gpus - 1, rule)), (gpus - 1, rule))
        return replace(allowed, most=most) if self._too_large else allowed

    @property
    def groups(self) -> list[str]:
        """What each group of refused jobs has in common: a field's name.

        Refusals that one user's jobs alone have met are left out, except sizes.
        """
        return [kind for kind, _, user in self._known if kind == "size" or not user]

    def note(self) -> str:
        """Return the text for `polluxctl status`; empty without refusals."""
        return "; ".join(
            f"{STUCK}{time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(r.since))}: Slurm refuses to start jobs"
            + (f" of the size of job {name}" if kind == "size" else f" of {kind} {name}")
            + f" ({r.reason})"
            for (kind, name, user), r in sorted(self._known.items())
            if kind == "size" or not user
        )


def _names(job: SlurmJob) -> dict[str, str]:
    """What the job may have in common with others that are refused, by kind."""
    return {
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "licenses": ",".join(sorted(job.licenses)),
        "user": f"{job.user} in account {job.account} and QOS {job.qos}",
        "size": str(job.job_id),
        "job": str(job.job_id),
    }


def _keys(job: SlurmJob) -> list[_Key]:
    return [(kind, name, user) for kind, name in _names(job).items() for user in (job.user, "")]
