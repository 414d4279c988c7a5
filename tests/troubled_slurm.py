"""A Slurm in memory to which things happen: calls fail, slurmctld crashes, users and administrators act."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from polluxd.errors import SlurmError, SlurmUnavailable
from polluxd.model import JobState, Node
from polluxd.slurm.fake import FakeSlurm
from polluxd.slurm.fake.fake_job import FakeJob

READS = ("observe", "jobs")
WRITES = (
    "requeue", "run_again", "configure", "release", "limit_time", "probe", "shrink", "cancel", "renew",
)  # fmt: skip


@dataclass(slots=True)
class _Fault:
    call: str
    error: SlurmError
    applied: bool
    times: int


class TroubledSlurm(FakeSlurm):
    """A FakeSlurm with faults to inject."""

    def __init__(self, nodes: Iterable[Node], **options: Any) -> None:
        super().__init__(nodes, **options)
        self._faults: list[_Fault] = []
        self._answers_at = self._now
        for name in (*READS, *WRITES):
            setattr(self, name, self._troubled(name, getattr(self, name)))

    def fail(self, call: str, error: SlurmError, *, applied: bool = False, times: int = 1) -> None:
        """Make the next `times` calls named `call` raise `error`.

        With `applied`, each call raises only after it has carried out the request.
        """
        self._faults.append(_Fault(call, error, applied, times))

    def mend(self) -> None:
        """Remove all faults."""
        self._faults.clear()
        self._answers_at = self._now

    def break_controller(self, seconds: float, *, forgets_s: float = 0.0) -> None:
        """Crash slurmctld, so that no call is answered for `seconds`.

        Running jobs that had started in the last `forgets_s` seconds are pending again, with the restart count that
        they had. Their processes are killed.
        """
        self._answers_at = self._now + seconds
        for job in self._jobs.values():
            young = job.started is not None and job.started > self._now - forgets_s
            if job.state is JobState.RUNNING and young:
                job.held, job.started = {}, None
                job.state, job.raw_state = JobState.PENDING, "PENDING"

    def requeue_by_hand(self, job_id: int) -> None:
        """Run `scontrol requeue` as the job's user.

        A companion was submitted with --no-requeue and is not requeued.
        """
        job = self._jobs[job_id]
        if job.state is JobState.RUNNING and job.companion is None:
            job.restarts += 1
            self._leave(job, JobState.PENDING)

    def raw(self, job_id: int) -> FakeJob:
        """Return the job as the fake keeps it."""
        return self._jobs[job_id]

    def opens(self, node: str) -> bool:
        """Whether jobs start on the node."""
        return self._nodes[node].schedulable

    def hold(self, job_id: int, on: bool = True) -> None:
        """Run `scontrol hold` or, with on=False, `scontrol release`."""
        self._jobs[job_id].on_hold, self._jobs[job_id].record = on, None

    def depend(self, job_id: int, on: int | None) -> None:
        """Make a waiting job wait for another one, or for none."""
        job = self._jobs[job_id]
        if job.state is JobState.PENDING:
            job.depends_on = on

    def shorten(self, job_id: int, seconds: float) -> None:
        """Lower a job's time limit."""
        self._jobs[job_id].time_limit_s = seconds

    def _troubled(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def troubled(*args: Any, **words: Any) -> Any:
            if name == "renew" and not args[0]:
                return None  # no job, no call
            try:
                self._fault(name, applied=False)
            except SlurmError:
                if name in WRITES:
                    jobs = [args[0]] if isinstance(args[0], int) else args[0]
                    self.calls += [(name, job_id) for job_id in (jobs if name == "cancel" else jobs[:1])]
                raise
            found = call(*args, **words)
            self._fault(name, applied=True)
            return found

        return troubled

    def _fault(self, call: str, *, applied: bool) -> None:
        if self._now < self._answers_at:
            raise SlurmUnavailable(f"{call}: slurmctld does not answer")
        for fault in self._faults:
            if fault.call == call and fault.applied is applied and fault.times > 0:
                fault.times -= 1
                raise fault.error
