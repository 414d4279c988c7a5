"""Run a trainer of its own loop, and speak the agent's protocol for it.

polluxd's order to stop is answered at the trainer's next checkpoint, without a word to the trainer; with `--signal` it
is asked to save sooner. The trainer trains on until Slurm ends the job. A start at another size that fails before its
first step is not tried again: the job goes back to a size that has trained.
"""

from __future__ import annotations

import logging
import math
import re
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.scheduler.publisher import Publisher
from pollux.slurm_job import slurm_commands
from pollux.slurm_job.access import SUBMITTED, GatewayAccess
from pollux.slurm_job.allocation import environment_of_srun, nodes_now, show_job, task_of, visible_gpus
from pollux.slurm_job.attempt import Attempt
from pollux.slurm_job.environment import time_limit_at, yes
from pollux.slurm_job.shared_folder import why_of_this_attempt
from pollux.wrap.checkpoints import Checkpoints
from pollux.wrap.process import TrainerProcess
from pollux.wrap.sizes import UNKNOWN_BATCH, of_training
from pollux.wrap.steps import Steps
from pollux.wrap.trainers import PATTERNS

log = logging.getLogger("pollux")

TICK_S = 0.2
FRUITLESS = 3
"""Starts in a row that trained too little to be measured, after which the job ends as its trainer did."""
ENDING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
PASSED_ON = *ENDING, signal.SIGUSR1, signal.SIGUSR2
UNSEEN_S = 110.0
"""After this time without a step the user is told, within two minutes of the start."""
UNSAVED = "its trainer has saved no checkpoint yet"
LOST = "after a move its trainer would not see its checkpoints: "
UNSEEN = "no line of its trainer has named a step, so it cannot be measured"
HANGS, HANGS_S = 10.0, 900.0
"""A new size at which no step comes in so many times the longest start, and so many seconds, is one that refuses."""
TIME_LIMIT = -1
"""In place of a move: the job's time limit is near."""
LIMIT_S = 60.0
"""Before the time limit, for a checkpoint to be complete and the job to be requeued."""
ENDED_S = 5.0
"""Slurm ends a requeued job's processes within this time."""
REPEAT_S = 10.0
"""Between two questions to a Slurm that does not answer."""
UNKNOWN_SAVE_S = 3600.0
"""What is said of the next checkpoint of a trainer whose rhythm is not known yet; polluxd waits no longer [s]."""


@dataclass(frozen=True, slots=True)
class Contract:
    """What the user says of the trainer; the options of `pollux wrap` explain it."""

    command: Sequence[str]
    checkpoints: str
    step: re.Pattern[str] | None = None
    signal: signal.Signals | None = None
    grace: float = 60.0
    batches: Sequence[tuple[float, int]] = ((0.0, UNKNOWN_BATCH),)
    steps: float | None = None
    oldest: float = math.inf


class Wrapper:
    """One attempt of a wrapped job."""

    def __init__(
        self,
        contract: Contract,
        attempt: Attempt,
        access: GatewayAccess,
        folder: Path,
        environ: dict[str, str],
    ) -> None:
        self._contract, self._attempt, self._access = contract, attempt, access
        self.nodes = nodes_now(environ)
        self.gpus = self.nodes * max(len(visible_gpus(environ)), 1)
        self._slurms = environ
        self._environ = environment_of_srun(environ) | {
            "POLLUX_NODES": str(self.nodes),
            "POLLUX_GPUS_PER_NODE": str(self.gpus // self.nodes),
            "POLLUX_GPUS": str(self.gpus),
            # A pipe would keep lines back that name steps.
            "PYTHONUNBUFFERED": environ.get("PYTHONUNBUFFERED", "1"),
        }
        # An agent in the trainer would report for the job beside this process.
        self._environ.pop(SUBMITTED, None)
        self.file, self._sizes = of_training(folder, contract.checkpoints, access.attempt)
        self._checkpoints = Checkpoints(contract.checkpoints, step=lambda: self.steps.number)
        patterns = [contract.step] if contract.step else PATTERNS
        begin = self._sizes.step if self._checkpoints.present else 0.0
        why = why_of_this_attempt(self._checkpoints.folder, environ)
        if not why and self._sizes.every and not self._checkpoints.present:
            why = f"{self._checkpoints.folder} on this node has none of those of the attempt before"
        self._lost = why and _printable(LOST + why)
        self.steps = Steps(patterns, self._sizes.line, begin)
        self.child: TrainerProcess
        self._asked = False
        """The trainer was sent the signal since its start: its end is none of the training."""
        self.order: tuple[int, float] | None = None
        """The move to stop for, and when its order came; `TIME_LIMIT` in place of a move."""
        self.signalled_at: float | None = None
        self._told = threading.Event()
        """This process was told to end: the trainer's end says nothing of its size, and it is not started again."""
        self.publisher = Publisher(access, self.report, self._take_order, lambda order: None)
        self._written_at = 0.0
        self._started_at = time.monotonic()
        self._unseen = False
        """No step was recognised, and that was said."""
        self._ended_as = ""
        self._reached = begin
        """The most steps that were seen: an evaluation counts for a while, and the batch size does not go back."""
        self._batch = self._batch_at(begin)
        self._ends_at = time_limit_at(environ, ask=True)
        self._continues = yes(environ, "POLLUX_CONTINUE", False)

    def run(self) -> int:
        self._start()
        for number in PASSED_ON:
            signal.signal(number, self._pass_on)
        self.publisher.start()
        if self._lost:
            log.error("cannot be moved: %s. Have it save in a folder that all nodes share", self._lost)
        announced = False
        try:
            while True:
                time.sleep(TICK_S)
                self._checkpoints.look()
                if not announced and (first_at := self.steps.first_at) is not None:
                    announced = True
                    self._checkpoints.trains()
                    self._sizes.start = max(self._sizes.start, first_at - self._attempt.times.launched_at)
                    self.publisher.wake()
                if self.steps.first_at is None and (why := self._overdue()):
                    return self._back(1, why)
                self._keep()
                self._watch_limit()
                status, order = self.child.status, self.order
                finished = status == 0 and (self.steps.last or 0.0) >= (self._contract.steps or math.inf)
                if status is not None and (not self._asked or self._told.is_set() or finished):
                    self.child.join()
                    return self._ended(status)
                if order is not None:
                    self._answer(*order)
                elif status is not None and not self._goes_on():
                    return 128 + signal.SIGTERM
        finally:
            self.publisher.close()

    # -- the trainer -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._asked, self.signalled_at = False, None
        self.child = TrainerProcess(self._contract.command, self._environ, self.steps.feed)

    def _pass_on(self, number: int, _frame: object) -> None:
        """Pass a signal on to the command, whose place this process has."""
        if number in ENDING:
            self._told.set()
        self.child.pass_on(number)

    def _overdue(self) -> str:
        """Say once that no step was seen; return why the trainer counts as not starting at this size, or nothing."""
        waited = time.monotonic() - self._started_at
        if waited > UNSEEN_S and not self._unseen:
            self._unseen = True
            log.warning(
                "cannot be moved: %s. polluxd keeps this job on its %d GPUs. If it prints its steps, name the line by "
                "--step",
                UNSEEN,
                self.gpus,
            )
            self.publisher.wake()
        limit = max(HANGS_S, HANGS * self._sizes.start)
        return f"no step in {limit:.0f} s" if waited > limit and self._is_new_size() else ""

    def _is_new_size(self) -> bool:
        """It has trained at other sizes, and not at this one."""
        return self._sizes.ended < 0 and bool(self._sizes.good) and self.gpus not in self._sizes.good

    def _ended(self, status: int) -> int:
        """Return the status to end with, once the trainer has ended and is not started again."""
        if self._told.is_set():
            if self._asked:  # Slurm ends the batch script in these moments, whose next line is not to run
                time.sleep(1.0)
                status = 128 + signal.SIGTERM
        elif (status or self.steps.first_at is None) and self._is_new_size():
            # A pipe into `tee` has the status of `tee`.
            return self._back(status or 1, f"status {status}: {self.steps.last_line}")
        else:
            # By the last report of this process: what the batch script does next would begin again.
            self._ended_as = "its trainer has ended"
            if status == 0:
                self._sizes.ended, self._sizes.fruitless = self._access.attempt, 0
        self._write()
        return status

    def _back(self, status: int, why: str) -> int:
        """Bring the job back to a size at which its trainer has trained."""
        self._sizes.bad[self.gpus] = _printable(why)
        self._sizes.fruitless += 1
        kept = self._write()
        log.error(
            "the trainer does not train on %d GPUs (%s); it has trained on %s. polluxd will not start it on %d again",
            self.gpus,
            why.partition(":")[0],  # the log has the trainer's own words
            ", ".join(map(str, self._sizes.good)),
            self.gpus,
        )
        if self._sizes.fruitless >= FRUITLESS or not kept:  # the next attempt would try this size again
            return status
        self.publisher.close()  # with a last report: polluxd has to know before it places the job again
        if self._requeue():
            self._wait_for_end()
        return status

    def _requeue(self) -> bool:
        # The last task of an array has the number of all.
        done = slurm_commands.run("scontrol", "requeue", task_of(self._slurms), environ=self._environ)
        if done.returncode:
            log.error("scontrol requeue: %s", _printable(done.stderr))
        return not done.returncode

    # -- orders ------------------------------------------------------------------------------------------------

    def _take_order(self, move: int) -> None:
        """Called in the publisher's thread."""
        self.order = (move, time.monotonic()) if move else None
        self.publisher.wake()  # polluxd waits as long as the newest report says

    def _watch_limit(self) -> None:
        """Near the time limit, save as for a move, and with `continue=yes` go back into the queue."""
        if self._ends_at is None or self.order is not None or not (self._signals or self._continues):
            return
        rhythm = (self._checkpoints.every or self._sizes.every or 0.0) * (self.steps.seconds or 0.0)
        # A job of few minutes trains for a part of them all the same.
        whole = self._ends_at - time.time() + time.monotonic() - self._started_at
        left = self._contract.grace if self._signals else min(rhythm, whole / 4)
        if time.time() > self._ends_at - left - min(LIMIT_S, whole / 8):
            asked, self._ends_at = self._ends_at, time_limit_at(self._slurms, ask=True)
            if self._ends_at is not None and self._ends_at <= asked + 1.0:
                self._ends_at, self.order = None, (TIME_LIMIT, time.monotonic())

    def _answer(self, move: int, ordered_at: float) -> None:
        """Go on with an order: ask for a checkpoint if that may be, and acknowledge the first one that is complete."""
        now, ended = time.monotonic(), self.child.status is not None
        if self._signals is not None and self.signalled_at is None and not ended:
            self.signalled_at, self._asked = now, True
            self.child.signal_trainer(self._signals, self._slurms)
            return
        if ended:
            self.child.join()
            self._checkpoints.look(ended=True)
        saved = self._checkpoints.saved_since(ordered_at)
        if self._signals is not None and not saved and (ended or self.signalled_at is not None):
            if not ended and now < (self.signalled_at or now) + self._contract.grace:
                return
            log.warning(
                "the trainer saved nothing within %.0f s of %s: it is not asked again, and its own checkpoints are "
                "waited for",
                self._contract.grace,
                self._signals.name,
            )
            self._sizes.deaf = True
            self._write()
        if not saved and not ended:
            return
        self._write()
        if not saved:
            log.warning(
                "the trainer ended without a checkpoint: %.0f s of it are trained again",
                self._checkpoints.age,
            )
        # What is trained from the checkpoint on is trained again: it counts to the cost of the move.
        at = time.time() - self._checkpoints.age
        stamps: dict[str, Any] = {"step": self._checkpoints.last_step, "last_step_at": at, "stopped_at": at}
        if move == TIME_LIMIT:
            if self._continues and self._requeue():
                log.info("continue=yes: the job goes back into the queue, and on from its checkpoint")
            self._wait_for_end()
        elif self.publisher.acknowledge(move, stamps):
            log.info("move %d: the trainer's checkpoint is complete; it goes on from there", move)
            self._wait_for_end(move)
            if not self._told.is_set():
                log.warning("nobody ended this job after its checkpoint: it trains on")
        if self.order is not None and self.order[0] == move:
            self.order = None
        self.signalled_at = None

    def _wait_for_end(self, move: int = 0) -> None:
        """Wait for Slurm to end the job, for a bounded time. Without `move`, polluxd has requeued it, or lets it be."""
        until = time.monotonic() + self._attempt.settings.drain_wait
        while (now := time.monotonic()) < until and not self._told.wait(min(TICK_S, until - now)):
            if move and self.order is None:
                until, move = min(until, now + ENDED_S), 0

    def _goes_on(self) -> bool:
        """Start the trainer again, which has saved and ended for an order that was taken back since.

        Returns False where Slurm has ended this attempt, and lost its processes: the next one trains already.
        """
        shown = show_job(str(self._access.job_id))
        if shown is None:
            self._told.wait(REPEAT_S)
        elif " JobState=RUNNING " in shown and f" Restarts={self._access.attempt} " in shown:
            self._start()
        else:
            return False
        return True

    @property
    def _signals(self) -> signal.Signals | None:
        """What the trainer is sent; None once that brought no checkpoint."""
        return None if self._sizes.deaf else self._contract.signal

    # -- reports -----------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Keep what was measured for later attempts, once it is known and once a minute."""
        if self.steps.line and self.steps.line != self._sizes.line:
            if self._sizes.line:  # its rows count in another unit
                self._sizes.every, self._sizes.rows = None, {}
            self._sizes.line = self.steps.line
        self._reached = max(self._reached, self.steps.number)
        if (batch := self._batch_at(self._reached)) != self._batch:
            self._batch = batch
            self.steps.forget_times()
            self.publisher.wake()
        if (seconds := self.steps.seconds) is None:
            return
        self._sizes.rows[self.nodes, self.gpus, batch] = seconds
        self._sizes.bad.pop(self.gpus, None)
        self._sizes.fruitless = 0
        self._sizes.every = self._checkpoints.every or self._sizes.every
        if time.monotonic() > self._written_at + 60.0:
            self._write()

    def _batch_at(self, step: float) -> int:
        return next(batch for begin, batch in reversed(self._contract.batches) if step >= begin)

    def _write(self) -> bool:
        self._written_at, self._sizes.step = time.monotonic(), self._checkpoints.last_step or self._sizes.step
        try:
            self._sizes.write(self.file)
        except OSError as error:
            log.warning("what was measured cannot be kept in %s: %s", self.file, error)
            return False
        return True

    def report(self) -> dict[str, Any]:
        """Return the report to the gateway: a job of one batch size, whose throughput alone counts."""
        batch, seconds, sizes, first_at = self._batch, self.steps.seconds, self._sizes, self.steps.first_at
        params, most, progress = sizes.fitted(), sizes.most_allowed(), self.steps.number
        throughput = batch / seconds if seconds else 0.0
        least_each = 1 if most is None else max(1, -(-batch // most))
        measured = sizes.rows or {(0, 0, 0): 0.0}
        times = {"launched_at": self._attempt.times.launched_at}
        unsaved = "" if self._checkpoints.present or self._signals else UNSAVED
        return {
            **{"v": 1, "at": time.time(), "noise": None, "resize": "requeue", "resized": 0},
            "params": params and {k: v for k, v in params._asdict().items() if v is not None},
            "limits": {"initial": batch, "maximum": batch, "local_min": least_each, "local_max": batch},
            "explored_gpus": max(gpus for _, gpus, _ in measured),
            "explored_nodes": max(nodes for nodes, _, _ in measured),
            **{"gpus": self.gpus, "nodes": self.nodes, "batch_size": batch, "accumulation": 0},
            "local_batch": max(1, batch // self.gpus),
            **{"goodput": throughput, "throughput": throughput, "progress": progress},
            # Where the batch size changes, a step is no unit of what remains.
            "target": self._contract.steps if len(self._contract.batches) == 1 else None,
            **{"epoch": 0.0, "lr_factor": 1.0, "gain": 1.0, "optimizer_steps": int(progress)},
            "checkpointed": self._checkpoints.present and self._checkpoints.age <= self._contract.oldest,
            "barred": sizes.barred() or None,
            "least_gpus": sizes.least_allowed(),
            "next_save_s": self._next_save_s(),
            "immovable": self._ended_as
            or (UNSEEN if self._unseen and first_at is None else self._lost or unsaved)
            or None,
            "times": times if first_at is None else times | {"first_step_at": first_at},
        }

    def _next_save_s(self) -> float:
        """Return the seconds until a checkpoint can be counted on; a trainer that saves on a signal is soon asked."""
        if self._signals is not None:
            asked_at = self.signalled_at
            left = 0.0 if asked_at is None else asked_at + self._contract.grace - time.monotonic()
            return max(left, 0.0)
        every, seconds = self._checkpoints.every or self._sizes.every, self.steps.seconds
        if every is None or seconds is None:
            return UNKNOWN_SAVE_S
        left = every - (self.steps.number - self._checkpoints.last_step)
        return min(max(left, 0.0) * seconds, UNKNOWN_SAVE_S)  # one that is late comes at once


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)[:200]
