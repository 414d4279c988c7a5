"""Publish reports and read instructions, in a separate thread.

Each job has one daemon thread and one database connection, on rank 0. There is no queue: only the latest report is
kept, so a database that is down for hours costs no memory. Every wait is bounded. No error reaches the training, and
neither token nor password reaches a log.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import select
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pollux.scheduler.database import DatabaseAway, JobDatabase, PayloadRefused, TicketOver
from pollux.scheduler.orders import DrainOrder, Order, ResizeOrder, ResizeWithdrawn
from pollux.slurm_job.ticket import Ticket
from pollux.tuning.knowledge import Introduction

log = logging.getLogger(__name__)

_LONGEST_BACKOFF_S = 60.0
_ACKNOWLEDGE_RETRY_S = 0.5

INTRODUCTIONS = 100
"""Attempts of a run to send its introduction: an hour or two if the database is down."""


@dataclass(slots=True)
class _Acknowledgement:
    move_id: int
    payload: str
    done: threading.Event = field(default_factory=threading.Event)
    accepted: bool = False


class Publisher:
    """Reports for one attempt of one job.

    Args:
        collect: returns the payload of `publish_v1` (design: JSON numbers, finite). Called from the reporter's
            thread, so it must be cheap and thread-safe.
        deliver: called from the reporter's thread with each order, once per move; with an order to drain again
            where its acknowledgement found nobody.
        interval_s: between reports; the ticket's by default.
        introduction: sent before the first report; None: use no earlier measurements, and leave none to later runs.
    """

    def __init__(
        self,
        ticket: Ticket,
        collect: Callable[[], dict[str, Any]],
        deliver: Callable[[Order], None],
        *,
        interval_s: float | None = None,
        introduction: Introduction | None = None,
    ) -> None:
        self._database = JobDatabase(ticket)
        self._collect = collect
        self._deliver = deliver
        self.introduction = introduction
        self._introductions_left = INTRODUCTIONS
        self._interval_s = ticket.publish_interval_s if interval_s is None else interval_s
        self._thread = threading.Thread(target=self._run, name="pollux-report", daemon=True)
        # A pipe rather than an Event: a signal handler that takes a lock of the thread it interrupts never returns.
        # It stays open to the end of the process: a late `wake` must not write into a reused descriptor.
        self._bell_out, self._bell_in = os.pipe()
        os.set_blocking(self._bell_out, False)
        os.set_blocking(self._bell_in, False)
        self._lock = threading.Lock()
        self._pending: _Acknowledgement | None = None
        self._closing = False
        self._ended = False
        self.failures = 0
        self._complaint = ""
        self._drain_seen: int | None = None
        self._resize_seen: int | None = None

    def start(self) -> None:
        """Begin to report, at once and then every interval."""
        self._thread.start()

    def wake(self) -> None:
        """Report and look at the instructions now.

        Safe in a signal handler; returns at once.
        """
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: nothing is left to wake
            os.write(self._bell_in, b"!")

    def acknowledge(self, move_id: int, payload: Mapping[str, Any], *, timeout_s: float = 20.0) -> bool:
        """Say that the checkpoint which a move asked for is durable.

        Retries until the database answers, for at most `timeout_s` seconds. Returns False if the move is over, or if
        the database did not answer. The checkpoint stays in any case.
        """
        try:
            encoded = json.dumps(dict(payload), allow_nan=False)
        except (TypeError, ValueError) as error:
            log.warning("acknowledgement %d sent without its stamps: %s", move_id, error)
            encoded = "{}"
        mine = _Acknowledgement(move_id, encoded)
        with self._lock:
            if self._ended or self._closing:
                return False
            self._pending = mine
        self.wake()
        mine.done.wait(timeout_s)
        with self._lock:
            if self._pending is mine:
                self._pending = None
        if not mine.done.is_set():
            # Nobody answered, so the order stands: it is passed on again when the database is back.
            self._drain_seen = None
        return mine.accepted

    @property
    def ended(self) -> bool:
        """The reporter has ended, or no database will ever take its reports."""
        return self._ended

    def close(self, timeout_s: float = 5.0) -> None:
        """Publish once more if that is quick, and end.

        Harmless when called twice or before `start`.
        """
        with self._lock:
            self._closing = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while True:
                last = self._closing
                try:
                    self.exchange()
                    self._recovered()
                except TicketOver as error:
                    log.warning("no more reports to Pollux: %s; training goes on", error)
                    return
                except DatabaseAway as error:
                    self.failures += 1
                    self._complain(f"Pollux' database cannot be reached: {error}")
                if last:
                    return
                self._sleep(self.pause())
        except Exception:
            log.exception("the Pollux reporter ended on a fault of its own; training goes on")
        finally:
            self._database.close()
            with self._lock:
                self._ended = True
                if self._pending is not None:
                    self._pending.done.set()

    def exchange(self) -> None:
        """One round: acknowledge if asked to, publish, take the instructions."""
        self._acknowledge_pending()
        self._introduce()
        report = self._report()
        try:
            instructions = self._database.instructions() if report is None else self._database.publish(report)
        except PayloadRefused as error:
            self._complain(f"Pollux' database refused the report: {error}")
            instructions = self._database.instructions()
        self.take_orders(instructions)
        self._acknowledge_pending()

    def _introduce(self) -> None:
        """Read earlier runs' measurements, before the first report.

        Give up after INTRODUCTIONS tries.
        """
        mine = self.introduction
        if mine is None:
            return
        try:
            answer = self._database.prior(mine.fingerprint, mine.gpu_type)
        except DatabaseAway as error:
            self._introductions_left -= 1
            if self._introductions_left <= 0:
                self.introduction = None
                self._complain(f"nothing is learned from earlier runs: {error}")
            # Away for reports too, or only without this function: reporting finds out which.
            return
        except PayloadRefused as error:
            self.introduction = None
            self._complain(f"nothing is learned from earlier runs: {error}")
            return
        self.introduction = None
        try:
            mine.learn(answer)
        except Exception:
            log.exception("what earlier runs have measured could not be taken over")

    def _report(self) -> str | None:
        try:
            return json.dumps(self._collect(), allow_nan=False)
        except Exception as error:
            # An order to drain must arrive in spite of any error in the measurements.
            self._complain(f"no report could be made: {type(error).__name__}: {error}")
            return None

    def take_orders(self, instructions: Any) -> None:
        """Deliver the orders in the database's answer that are new."""
        orders = instructions if isinstance(instructions, dict) else {}
        terms = orders.get("resize")
        order = ResizeOrder(terms) if isinstance(terms, dict) and terms.get("id") is not None else None
        number = None if order is None else order.terms["id"]
        if number != self._resize_seen:
            self._resize_seen = number
            self._pass_on(order or ResizeWithdrawn())
        drain = orders.get("drain")
        if drain is not None and drain != self._drain_seen:
            self._drain_seen = int(drain)
            self._pass_on(DrainOrder(self._drain_seen))

    def _pass_on(self, order: Order) -> None:
        try:
            self._deliver(order)
        except Exception:
            log.exception("the training could not take %s", order)

    def _acknowledge_pending(self) -> None:
        with self._lock:
            pending = self._pending
        if pending is None or pending.done.is_set():
            return
        try:
            pending.accepted = self._database.acknowledge(pending.move_id, pending.payload)
        except PayloadRefused as error:
            # The times are optional, the acknowledgement is not.
            self._complain(f"the acknowledgement's stamps were refused: {error}")
            pending.accepted = self._database.acknowledge(pending.move_id, "{}")
        pending.done.set()

    def pause(self) -> float:
        """Seconds until the next round.

        They are spread, so that jobs started together do not report together.
        """
        with self._lock:
            waiting = self._pending is not None and not self._pending.done.is_set()
        if waiting:
            return _ACKNOWLEDGE_RETRY_S
        spread = random.uniform(0.9, 1.1)
        if not self.failures:
            return self._interval_s * spread
        backoff = min(self._interval_s, 1.0) * 2.0 ** min(self.failures - 1, 10)
        return min(backoff, _LONGEST_BACKOFF_S) * spread

    def _sleep(self, seconds: float) -> None:
        readable, _, _ = select.select([self._bell_out], [], [], seconds)
        if readable:
            with contextlib.suppress(BlockingIOError):
                os.read(self._bell_out, 4096)

    def _complain(self, complaint: str) -> None:
        """Log a trouble once, not at every round."""
        if complaint != self._complaint:
            log.warning("%s; training goes on", complaint)
            self._complaint = complaint

    def _recovered(self) -> None:
        if self.failures:
            log.info("Pollux' database answers again")
            self._complaint = ""
        self.failures = 0
