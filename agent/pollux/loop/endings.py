"""End a training early without losing progress.

A signal asks this process to end (SIGTERM: from scancel, preemption, a node that shuts down, torchrun, Kubernetes;
SIGUSR1: from `sbatch --signal`), or the job's time limit approaches. Rank 0 then puts the
reason into its next decision. After that step all ranks write a checkpoint and end.

The sender of the signal sets the grace period: Slurm's KillWait or GraceTime, torchrun's 30 s. So the save begins after
the current step. The agent knows the time limit in advance: it stops early enough for a save, by the longest save of
this attempt.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import NoReturn

from pollux.errors import STOPPED_STATUS
from pollux.loop.notices import notice
from pollux.slurm_job import slurm_commands
from pollux.slurm_job.allocation import show_job, task_of
from pollux.slurm_job.environment import time_limit_at, yes

logger = logging.getLogger("pollux")

MARGIN = 10.0
"""Seconds before the time limit, in addition to saves and steps: Slurm checks limits every few seconds."""

LOOK = 20.0
"""Seconds between two reads of the duration of a save."""


LOADER = "torch/utils/data/dataloader.py"
"""Where torch forks its data-loading processes."""

SLURM_WAIT = 3600.0
"""Seconds that a job waits for Slurm to end it. GraceTime may be long."""


class Reason(IntEnum):
    """Why a training ends before its time."""

    NONE = 0
    TERM = 1
    USR1 = 2
    TIME_LIMIT = 3

    @property
    def text(self) -> str:
        return {1: "SIGTERM", 2: "SIGUSR1", 3: "the job's time limit"}.get(self, "")


class Endings:
    """Receives the requests to end of one rank, and carries them out."""

    def __init__(
        self,
        *,
        main: Callable[[], bool],
        margin: Callable[[], float],
        environ: Mapping[str, str] = os.environ,
        look: float = LOOK,
    ) -> None:
        """Receive requests from `begin` on. `main`: this is rank 0.

        `margin`: seconds before the time limit at which the training has to stop. `look`: between two reads of it.
        """
        self.wanted = Reason.NONE
        self._main, self._margin, self._environ, self._look = main, margin, environ, look
        self._lent = bool(environ.get("POLLUX_COMPANION"))
        self._continues = yes(environ, "POLLUX_CONTINUE", False)
        self._numbers = {signal.SIGTERM: Reason.TERM, signal.SIGUSR1: Reason.USR1}
        self._installed: set[signal.Signals] = set()
        self._closed = threading.Event()
        self._watched = False
        """Forks of this process are told of."""

    # -- requests ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Handle requests from now on: there is progress to save."""
        if self._installed or self._lent:
            # A companion's rank ends at once: the other ranks go on without it.
            return
        self._closed = threading.Event()
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                if _replaceable(number):
                    signal.signal(number, self._asked)
                    self._installed.add(number)
                else:
                    logger.info("the script handles %s itself: the agent saves nothing then", number.name)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._installed)
            if not self._watched:
                os.register_at_fork(after_in_child=self._forked)
            self._watched = True
        self.lead()

    def lead(self) -> None:
        """On rank 0: watch the time limit."""
        if self._main() and not self._lent and self._environ.get("SLURM_JOB_ID"):
            threading.Thread(
                target=self._watch_limit, args=(self._closed,), name="pollux-limit", daemon=True
            ).start()

    def _asked(self, number: int, _: FrameType | None) -> None:
        if self.wanted is Reason.NONE:
            self.wanted = self._numbers[signal.Signals(number)]

    def _forked(self) -> None:
        """In a forked process: act on signals as if the agent were not there."""
        installed = set(self._installed)
        self._restore()
        # Slurm signals every process of a step, and programs that a script starts know nothing of SIGUSR1.
        signal.pthread_sigmask(signal.SIG_BLOCK, installed & {signal.SIGUSR1})
        frame: FrameType | None = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.endswith(LOADER):
            frame = frame.f_back
        if installed and frame is not None:
            _end_with_parent_alone()

    def _watch_limit(self, closed: threading.Event) -> None:
        end = time_limit_at(self._environ)
        while end is not None and not closed.is_set():
            left = end - self._margin() - time.time()
            if left > 0:
                closed.wait(min(left, self._look))
                continue
            fresh = time_limit_at(self._environ, ask=True)
            if fresh is None or fresh <= end + 1.0:
                self.wanted = self.wanted or Reason.TIME_LIMIT
                return
            end = fresh  # somebody has given the job more time

    def close(self) -> None:
        """Restore the signals' handlers of before `begin`: training is over."""
        self._closed.set()
        self._restore()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let signals end this process at once: everything is saved."""
        installed = set(self._installed)
        self._restore()
        yield
        if threading.current_thread() is threading.main_thread():
            for number in installed:
                signal.signal(number, self._asked)
            self._installed = installed

    def _restore(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in self._installed:
                if signal.getsignal(number) == self._asked:
                    signal.signal(number, signal.SIG_DFL)
        self._installed = set()

    # -- the end, on every rank after the same step -----------------------------------------------------------

    def left_to_slurm(self, reason: Reason) -> bool:
        """On rank 0, after the save: whether to wait until Slurm ends the job.

        Slurm's records then show why Slurm ended the job. If this process ended with a status, they would show a
        failure. Slurm does not requeue a preempted job that ends by itself (Slurm 22.05).
        """
        job_id = self._environ.get("SLURM_JOB_ID")
        if not (self._main() and job_id):
            return False
        return reason is not Reason.TERM or "PreemptTime=2" in (show_job(job_id) or "")

    def end(self, reason: Reason, step: int, seconds: float | None, *, wait: bool) -> NoReturn:
        """End this process after the checkpoint of a step, or `wait` for Slurm.

        `seconds`: duration of the save; None if no checkpoint could be written.
        """
        self.close()
        if self._main():
            kept = (
                f"checkpoint of step {step} written in {seconds:.1f} s"
                if seconds is not None
                else "no checkpoint could be written, so the steps since the last one are lost"
            )
            saved = seconds is not None
            notice(f"{reason.text}: {kept}; the training ends here", event="ends", step=step, saved=saved)
            if wait and reason is not Reason.TERM and self._continues:
                self._requeue()
        until = time.monotonic() + (SLURM_WAIT if wait else 0.0)
        while time.monotonic() < until:
            time.sleep(1.0)
        raise SystemExit(STOPPED_STATUS)

    def _requeue(self) -> None:
        """Put the job back into the queue. scontrol(1)."""
        job_id = task_of(self._environ)  # the last task of an array has the id of all
        try:
            done = slurm_commands.run("scontrol", "requeue", job_id)
            trouble = (done.stderr.strip() or f"status {done.returncode}") if done.returncode else ""
        except (OSError, subprocess.SubprocessError) as error:
            trouble = str(error)
        if trouble:
            logger.error("continue=yes: Slurm does not requeue job %s: %s", job_id, trouble)
        else:
            notice(f"continue=yes: job {job_id} goes back into the queue, and on from this checkpoint")


def _end_with_parent_alone() -> None:
    """In a data-loading process: obey SIGTERM from the parent process only.

    Slurm signals every process of a step. If a data-loading process ended then, the training would fail before its last
    checkpoint.
    """
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def watch() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=watch, name="pollux-term", daemon=True).start()


def _replaceable(number: signal.Signals) -> bool:
    """Whether nothing but torch, Python or another library's loop handles it."""
    handler = signal.getsignal(number)
    if handler in (signal.SIG_DFL, signal.SIG_IGN):
        return True
    # Lightning's handler raises in the next batch, before the ranks have agreed to save.
    module = getattr(handler, "__module__", "") or type(handler).__module__
    return module.partition(".")[0] in ("lightning", "pytorch_lightning")
