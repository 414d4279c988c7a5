"""Run a trainer of its own loop, and speak the agent's protocol for it.

polluxd's order to stop is answered at the trainer's next checkpoint, without a word to the trainer; with `--signal` it
is asked to save sooner. The trainer trains on until Slurm ends the job. A start at another size that fails before its
first step is not tried again: the job goes back to a size that has trained.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pollux.errors import LaunchError
from pollux.scheduler.publisher import Publisher
from pollux.slurm_job import slurm_commands
from pollux.slurm_job.access import GatewayAccess, in_pollux_job
from pollux.slurm_job.allocation import environment_of_srun, nodes_now, visible_gpus
from pollux.slurm_job.attempt import Attempt
from pollux.wrap.checkpoints import Checkpoints
from pollux.wrap.sizes import UNKNOWN_BATCH, Sizes, file_in
from pollux.wrap.steps import Steps
from pollux.wrap.trainers import PATTERNS

log = logging.getLogger("pollux")

TICK_S = 0.2
FRUITLESS = 3
"""Starts in a row without a step after which the job ends as its trainer did."""
_READ = 65536
PASSED_ON = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
UNSEEN_S = 110.0
"""After this time without a step the user is told, within two minutes of the start."""
ENDED_S = 5.0
"""Slurm ends a requeued job's processes within this time."""
UNKNOWN_SAVE_S = 3600.0
"""What is said of the next checkpoint of a trainer whose rhythm is not known yet; polluxd waits no longer [s]."""


@dataclass(frozen=True, slots=True)
class Contract:
    """What the user says of the trainer."""

    command: Sequence[str]
    checkpoints: str
    """Pattern of files that change once a checkpoint is complete."""
    step: re.Pattern[str] | None = None
    """Of the lines that name a step; None: those of known trainers."""
    signal: signal.Signals | None = None
    """That makes it save and end; None: it is asked nothing."""
    grace: float = 60.0
    """Seconds that it may take for that."""
    batches: Sequence[tuple[float, int]] = ((0.0, UNKNOWN_BATCH),)
    """From each of these steps on, the examples of a step, over all GPUs."""
    steps: float | None = None
    """At which it ends."""


def wrap(contract: Contract) -> int:
    """Run the trainer to its end; return the status to exit with. Outside a Pollux job it takes this process's place.

    Raises LaunchError.
    """
    environ = dict(os.environ)
    if not in_pollux_job(environ):
        try:
            os.execvp(contract.command[0], list(contract.command))
        except OSError as error:
            raise LaunchError(f"cannot start {contract.command[0]}: {error}") from error
    attempt = Attempt.begin(None, seed=0, environ=environ)
    if attempt.access is None or attempt.directory is None:
        raise LaunchError(
            "this job's number or attempt makes no sense; call `pollux wrap` in the batch script itself"
        )
    return Wrapper(contract, attempt, attempt.access, attempt.directory, environ).run()


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
        self.nodes, self.gpus = _size(environ)
        self._environ = environment_of_srun(environ) | {
            "POLLUX_NODES": str(self.nodes),
            "POLLUX_GPUS_PER_NODE": str(self.gpus // self.nodes),
            "POLLUX_GPUS": str(self.gpus),
            # A pipe would keep lines back that name steps.
            "PYTHONUNBUFFERED": environ.get("PYTHONUNBUFFERED", "1"),
        }
        self.file = file_in(folder, contract.checkpoints)
        self._sizes = Sizes.read(self.file)
        self.steps = Steps([contract.step] if contract.step else PATTERNS)
        self._checkpoints = Checkpoints(contract.checkpoints, step=lambda: self.steps.number)
        self.child: subprocess.Popen[bytes] | None = None
        self._asked = False
        """The trainer was sent the signal since its start: its end is none of the training."""
        self.order: tuple[int, float] | None = None
        """The move to stop for, and when its order came."""
        self.signalled_at: float | None = None
        self._signals = contract.signal
        """None once it brought no checkpoint."""
        self._told_to_end = False
        """This process was sent a signal: the trainer's end says nothing of its size."""
        self.publisher = Publisher(access, self.report, self._take_order, lambda order: None)
        self._kept: tuple[float, float | None] = 0.0, None
        self._started_at = time.monotonic()
        self._unseen = False
        """No step was recognised, and that was said."""
        self._batch = self._batch_at(self._sizes.step)

    def run(self) -> int:
        self._start()
        for number in PASSED_ON:
            signal.signal(number, self._pass_on)
        self.publisher.start()
        announced = False
        try:
            while True:
                time.sleep(TICK_S)
                self._checkpoints.look()
                if not announced and self.steps.first_at is not None:
                    announced = True
                    self._checkpoints.trains()
                    self.publisher.wake()
                if self.steps.first_at is None and time.monotonic() > self._started_at + UNSEEN_S:
                    self._say_unseen()
                self._keep()
                assert self.child is not None
                status, order = self.child.poll(), self.order
                if status is not None and not self._asked:
                    self._join()
                    return self._ended(status)
                if order is not None:
                    self._answer(*order)
                elif status is not None:
                    self._start()  # it has saved and ended for an order that was taken back since
        finally:
            self.publisher.close()

    # -- the trainer -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        command = list(self._contract.command)
        try:
            child = subprocess.Popen(
                command, env=self._environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise LaunchError(f"cannot start {command[0]}: {error}") from error
        self.child, self._asked = child, False
        assert child.stdout is not None
        assert child.stderr is not None
        pairs = ((child.stdout, sys.stdout.buffer), (child.stderr, sys.stderr.buffer))
        self._pumps = [
            threading.Thread(target=self._pump, args=(number, *pair), daemon=True)
            for number, pair in enumerate(pairs)
        ]
        for pump in self._pumps:
            pump.start()

    def _pass_on(self, number: int, _frame: object) -> None:
        """Pass a signal on to the command, whose place this process has."""
        self._told_to_end = True
        assert self.child is not None
        self.child.send_signal(number)

    def _pump(self, number: int, source: IO[bytes], onto: IO[bytes]) -> None:
        """Pass on what the trainer prints, as it comes, and read its steps off it."""
        while data := os.read(source.fileno(), _READ):
            with contextlib.suppress(OSError, ValueError):
                onto.write(data)
                onto.flush()
            self.steps.feed(number, data, time.time())

    def _join(self) -> None:
        until = time.monotonic() + 5.0
        for pump in self._pumps:  # what the trainer has left behind may hold the pipe
            pump.join(max(until - time.monotonic(), 0.0))

    def _ended(self, status: int) -> int:
        """The trainer has ended, and nobody had asked it to."""
        status = 128 - status if status < 0 else status
        made_steps = self.steps.first_at is not None
        good = self._sizes.good
        if status == 0 or made_steps or not good or self.gpus in good or self._told_to_end:
            if made_steps:
                self._sizes.fruitless = 0
                self._write()
            return status
        self._sizes.bad[self.gpus] = _printable(f"status {status}: {self.steps.last_line}")
        self._sizes.fruitless += 1
        self._write()
        log.error(
            "the trainer ended with status %d before a step on %d GPUs; it has trained on %s. polluxd will not start "
            "it on %d again",
            status,
            self.gpus,
            ", ".join(map(str, good)),
            self.gpus,
        )
        if self._sizes.fruitless >= FRUITLESS:
            return status
        # polluxd has to know before it places the job again.
        self.publisher.wake()
        time.sleep(1.0)
        done = slurm_commands.run("scontrol", "requeue", str(self._access.job_id), environ=self._environ)
        if done.returncode:
            log.error("scontrol requeue: %s", _printable(done.stderr))
            return status
        self._wait_for_end()
        return status

    # -- orders ------------------------------------------------------------------------------------------------

    def _take_order(self, move: int) -> None:
        """Called in the publisher's thread."""
        self.order = (move, time.monotonic()) if move else None
        self.publisher.wake()  # polluxd waits as long as the newest report says

    def _answer(self, move: int, ordered_at: float) -> None:
        """Go on with an order: ask for a checkpoint if that may be, and acknowledge the first one that is complete."""
        assert self.child is not None
        now, ended = time.monotonic(), self.child.poll() is not None
        if self._signals is not None and self.signalled_at is None and not ended:
            self.signalled_at, self._asked = now, True
            self._send(self._signals)
        saved = self._checkpoints.saved_since(ordered_at)
        if self.signalled_at is not None and not saved and not ended:
            if now < self.signalled_at + self._contract.grace:
                return
            log.warning(
                "the trainer saved nothing within %.0f s of %s: it is not asked again, and its own checkpoints are "
                "waited for",
                self._contract.grace,
                self._contract.signal.name if self._contract.signal else "",
            )
            self._signals = self.signalled_at = None
        if not saved and not ended:
            return
        self._join_if_ended()
        if not saved:
            log.warning(
                "the trainer ended without a checkpoint: %.0f s of it are trained again",
                self._checkpoints.age,
            )
        # What is trained from the checkpoint on is trained again: it counts to the cost of the move.
        at = time.time() - self._checkpoints.age
        stamps: dict[str, Any] = {"step": self._checkpoints.last_step, "last_step_at": at, "stopped_at": at}
        if self.publisher.acknowledge(move, stamps):
            log.info("move %d: the trainer's checkpoint is complete; it goes on from there", move)
            self._wait_for_end(move)
            log.warning("nobody ended this job after its checkpoint: it trains on")
        if self.order is not None and self.order[0] == move:
            self.order = None
        self.signalled_at = None

    def _join_if_ended(self) -> None:
        assert self.child is not None
        if self.child.poll() is not None:
            self._join()

    def _wait_for_end(self, move: int = 0) -> None:
        """Wait for Slurm to end the job, for a bounded time. Without `move`, polluxd has requeued it, or lets it be."""
        until = time.monotonic() + self._attempt.settings.drain_wait
        while (now := time.monotonic()) < until:
            time.sleep(min(TICK_S, until - now))
            if move and self.order is None:
                until, move = min(until, now + ENDED_S), 0

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to the trainer's ranks.

        srun takes a TERM for an order to end at once. Slurm passes a signal on to the tasks of all steps. Without any
        step, the trainer runs below this process.
        """
        steps = slurm_commands.answer(
            "squeue", "--steps", "--noheader", "--format=%i", f"--jobs={self._access.job_id}"
        )
        own = [s for s in (steps or "").split() if s.rpartition(".")[2].isdigit()]
        if own:
            slurm_commands.run(
                "scancel", f"--signal={number.name.removeprefix('SIG')}", *own, environ=self._environ
            )
        elif self.child is not None:
            self.child.send_signal(number)

    # -- reports -----------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Keep what was measured for later attempts, once it is known and once a minute."""
        if self.steps.first_at is not None:
            self._sizes.step = self.steps.number
        if (batch := self._batch_at(self._sizes.step)) != self._batch:
            self._batch = batch
            self.steps.forget_times()
            self.publisher.wake()
        seconds, every = self.steps.seconds, self._checkpoints.every
        if seconds is None:
            return
        written_at, known_every = self._kept
        self._sizes.rows[self.nodes, self.gpus, batch] = seconds
        self._sizes.bad.pop(self.gpus, None)
        self._sizes.fruitless = 0
        self._sizes.every = every or self._sizes.every
        if time.monotonic() > written_at + 60.0 or (every is not None and known_every is None):
            self._kept = time.monotonic(), every
            self._write()

    def _batch_at(self, step: float) -> int:
        return next(batch for begin, batch in reversed(self._contract.batches) if step >= begin)

    def _say_unseen(self) -> None:
        """Say once what polluxd can do with a trainer whose steps it does not see."""
        if not self._unseen:
            self._unseen = True
            log.warning(
                "no line of the trainer named a step in %.0f s: polluxd keeps this job on its %d GPUs, and can neither "
                "measure nor move it. Name the line with --step PATTERN",
                UNSEEN_S,
                self.gpus,
            )

    def _write(self) -> None:
        try:
            self._sizes.write(self.file)
        except OSError as error:
            log.warning("what was measured cannot be kept in %s: %s", self.file, error)

    def report(self) -> dict[str, Any]:
        """Return the report to the gateway: a job of one batch size, whose throughput alone counts."""
        batch, seconds = self._batch, self.steps.seconds
        params = self._sizes.fitted()
        most = self._sizes.most_allowed()
        throughput = batch / seconds if seconds else 0.0
        step = self._sizes.step
        measured = self._sizes.rows or {(0, 0, 0): 0.0}
        return {
            "v": 1,
            "at": time.time(),
            "params": None
            if params is None
            else {k: v for k, v in params._asdict().items() if v is not None},
            "noise": None,
            "limits": {
                "initial": batch,
                "maximum": batch,
                "local_min": 1 if most is None else max(1, -(-batch // most)),
                "local_max": batch,
            },
            "explored_gpus": max(gpus for _, gpus, _ in measured),
            "explored_nodes": max(nodes for nodes, _, _ in measured),
            "gpus": self.gpus,
            "nodes": self.nodes,
            "batch_size": batch,
            "local_batch": max(1, batch // self.gpus),
            "accumulation": 0,
            "goodput": throughput,
            "throughput": throughput,
            "progress": step,
            # Where the batch size changes, a step is no unit of what remains.
            "target": self._contract.steps if len(self._contract.batches) == 1 else None,
            "epoch": 0.0,
            "lr_factor": 1.0,
            "gain": 1.0,
            "optimizer_steps": int(step),
            "checkpointed": self._checkpoints.present,
            "barred": self._sizes.barred() or None,
            "next_save_s": self._next_save_s(),
            "immovable": None
            if self._checkpoints.present or self._signals
            else "its trainer has saved no checkpoint yet",
            "restart_cost": self._start_s(),
            "times": {
                "launched_at": self._attempt.times.launched_at,
                **({} if self.steps.first_at is None else {"first_step_at": self.steps.first_at}),
            },
            "resize": "requeue",
            "resized": 0,
        }

    def _next_save_s(self) -> float:
        """Return the seconds until a checkpoint can be counted on; a trainer that saves on a signal is soon asked."""
        if self._signals is not None:
            asked_at = self.signalled_at
            left = 0.0 if asked_at is None else asked_at + self._contract.grace - time.monotonic()
            return max(left, 0.0)
        due = self._checkpoints.next_in(self.steps.seconds, self._sizes.every)
        return UNKNOWN_SAVE_S if due is None else min(due, UNKNOWN_SAVE_S)

    def _start_s(self) -> float | None:
        """Return how long this attempt took from its launch to its first step."""
        launched_at, first_at = self._attempt.times.launched_at, self.steps.first_at
        return None if launched_at is None or first_at is None else max(first_at - launched_at, 0.0)


def _size(environ: dict[str, str]) -> tuple[int, int]:
    """Return the nodes and GPUs of this attempt."""
    nodes = nodes_now(environ)
    return nodes, nodes * max(len(visible_gpus(environ)), 1)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)[:200]
