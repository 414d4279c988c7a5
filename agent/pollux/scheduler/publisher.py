"""Publish reports in one thread, and follow orders in another.

Rank 0 of a job has both threads, with one connection each to the gateway. There is no queue: only the latest report is
kept, so a gateway that is away for hours costs no memory. Every wait is bounded. No error reaches the training, and no
token reaches a log.
"""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pollux.scheduler.credentials import AccessOver, Credentials, JobGateway
from pollux.scheduler.gateway import Gateway, GatewayAway, MessageRefused
from pollux.slurm_job.access import GatewayAccess
from pollux.slurm_job.output_files import unopenable
from pollux.tuning.knowledge import Introduction

log = logging.getLogger(__name__)

_LONGEST_BACKOFF_S = 60.0
_LONGEST_ORDERS_BACKOFF_S = 15.0
_INTERVAL_S = 30.0  # until the gateway says another one
_ACKNOWLEDGE_RETRY_S = 0.5

INTRODUCTIONS = 100
"""Attempts of a run to send its introduction: an hour or two if the gateway is away."""


@dataclass(slots=True)
class _Acknowledgement:
    move_id: int
    stamps: Mapping[str, Any]
    done: threading.Event = field(default_factory=threading.Event)
    accepted: bool = False


class Publisher:
    """Reports for one attempt of one job, each `interval_s` (by default the gateway's).

    `collect` returns a report (JSON numbers, finite) in the reporter's thread: it must be cheap and thread-safe. In the
    thread of the orders, `drain` is called with each move that the job has to drain for (again where nobody answered
    the acknowledgement, with 0 where polluxd has ended the move), and `resize` with each order, as the gateway gives
    it; None: none stands. `introduction` goes first; None: use no earlier measurements, and leave none to later runs.
    """

    def __init__(
        self,
        access: GatewayAccess,
        collect: Callable[[], dict[str, Any]],
        drain: Callable[[int], None],
        resize: Callable[[Mapping[str, Any] | None], None],
        *,
        interval_s: float | None = None,
        introduction: Introduction | None = None,
    ) -> None:
        credentials = Credentials(access)
        self._gateway = JobGateway(Gateway(access.addresses, access.ca), credentials)
        self._orders = JobGateway(Gateway(access.addresses, access.ca), credentials)
        self._collect = collect
        self._drain, self._resize = drain, resize
        self.introduction = introduction
        self._introductions_left = INTRODUCTIONS
        self._given_interval_s = interval_s
        self._interval_s = interval_s or (access.grant.publish_interval_s if access.grant else _INTERVAL_S)
        self._thread = threading.Thread(target=self._run, name="pollux-report", daemon=True)
        self._follower = threading.Thread(target=self._follow, name="pollux-orders", daemon=True)
        self._bell = threading.Event()
        self._leaving = threading.Event()
        """The thread of the orders has to end."""
        self._lock = threading.Lock()
        self._pending: _Acknowledgement | None = None
        self._closing = False
        self._ended = False
        self.failures = 0
        self._complaint = ""
        self._orders_again = False
        """The gateway has to send orders again that it has sent before."""
        self._drain_seen: int | None = None
        self._resize_seen: int | None = None

    def start(self) -> None:
        """Begin to report, at once and then every interval, and to follow orders."""
        self._thread.start()
        self._follower.start()

    def wake(self) -> None:
        """Report now; returns at once."""
        self._bell.set()

    def acknowledge(self, move_id: int, payload: Mapping[str, Any], *, timeout_s: float = 20.0) -> bool:
        """Say that the checkpoint which a move asked for is durable.

        Retries until the gateway answers, for at most `timeout_s` seconds. Returns False if the move is over, or if
        the gateway did not answer. The checkpoint stays in any case.
        """
        stamps = dict(payload)
        try:
            json.dumps(stamps, allow_nan=False)
        except (TypeError, ValueError) as error:
            log.warning("acknowledgement %d sent without its stamps: %s", move_id, error)
            stamps = {}
        mine = _Acknowledgement(move_id, stamps)
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
            # Nobody answered, so the order stands: it is passed on again when the gateway is back.
            self._drain_seen, self._orders_again = None, True
            self._orders.interrupt()
        return mine.accepted

    @property
    def ended(self) -> bool:
        """The reporter has ended, or no gateway will ever take its reports."""
        return self._ended

    def close(self, timeout_s: float = 5.0) -> None:
        """Publish once more if that is quick, and end. Harmless when called twice or before `start`."""
        with self._lock:
            self._closing = True
        self._leaving.set()
        self._orders.interrupt()
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
                except AccessOver as error:
                    log.warning("no more reports to Pollux: %s; training goes on", error)
                    return
                except GatewayAway as error:
                    self.failures += 1
                    self._complain(f"Pollux' gateway cannot be reached: {error}")
                if last:
                    return
                self._bell.wait(self.pause())
                self._bell.clear()
        except Exception:
            log.exception("the Pollux reporter ended on a fault of its own; training goes on")
        finally:
            self._leaving.set()
            self._orders.interrupt()
            self._gateway.close()
            with self._lock:
                self._ended = True
                if self._pending is not None:
                    self._pending.done.set()

    def exchange(self) -> None:
        """One round: acknowledge if asked to, introduce the training, publish."""
        self._acknowledge_pending()
        self._introduce()
        report = self._report()
        if report is not None:
            try:
                self._gateway.publish(report)
            except MessageRefused as error:
                self._complain(f"Pollux' gateway refused the report: {error}")
        if self._given_interval_s is None:
            self._interval_s = self._gateway.publish_interval_s
        self._acknowledge_pending()

    def _follow(self) -> None:
        """Pass on orders until the reports end."""
        failures, seen = 0, ""
        try:
            while not self._leaving.is_set():
                if self._orders_again:
                    seen, self._orders_again = "", False
                try:
                    orders = self._orders.orders(seen)
                except AccessOver:
                    return  # the reporter says so
                except (GatewayAway, MessageRefused):
                    failures += 1
                    backoff = min(0.5 * 2.0 ** min(failures - 1, 10), _LONGEST_ORDERS_BACKOFF_S)
                    self._leaving.wait(backoff * random.uniform(0.5, 1.0))
                else:
                    failures, seen = 0, orders["seen"]
                    self.take_orders(orders)
        except Exception:
            log.exception("Pollux' orders are no longer followed; training goes on")
        finally:
            self._orders.close()

    def _introduce(self) -> None:
        """Read earlier runs' measurements, before the first report. Give up after INTRODUCTIONS tries."""
        mine = self.introduction
        if mine is None:
            return
        try:
            answer = self._gateway.prior(mine.fingerprint, mine.gpu_type)
        except GatewayAway as error:
            self._introductions_left -= 1
            if self._introductions_left <= 0:
                self.introduction = None
                self._complain(f"nothing is learned from earlier runs: {error}")
            # Away for reports too, or only for this question: reporting finds out which.
            return
        except MessageRefused as error:
            self.introduction = None
            self._complain(f"nothing is learned from earlier runs: {error}")
            return
        self.introduction = None
        try:
            mine.learn(answer)
        except Exception:
            log.exception("what earlier runs have measured could not be taken over")

    def _report(self) -> Mapping[str, Any] | None:
        try:
            report = self._collect()
            report["immovable"] = report.get("immovable") or unopenable()
            json.dumps(report, allow_nan=False)
            return report
        except Exception as error:
            # The acknowledgement of an order must pass in spite of any error in the measurements.
            self._complain(f"no report could be made: {type(error).__name__}: {error}")
            return None

    def take_orders(self, orders: Mapping[str, Any]) -> None:
        """Deliver the orders in the gateway's answer that are new."""
        terms = orders.get("resize")
        number = terms.get("id") if isinstance(terms, dict) else None
        if number != self._resize_seen:
            self._resize_seen = number
            self._pass_on(self._resize, None if number is None else terms)
        drain = orders.get("drain")
        if drain is None and self._drain_seen is not None:
            self._drain_seen = None
            self._pass_on(self._drain, 0)
        elif drain is not None and drain != self._drain_seen:
            self._drain_seen = int(drain)
            self._pass_on(self._drain, self._drain_seen)

    def _pass_on(self, take: Callable[[Any], None], order: Any) -> None:
        try:
            take(order)
        except Exception:
            log.exception("the training could not take the order %s", order)

    def _acknowledge_pending(self) -> None:
        with self._lock:
            pending = self._pending
        if pending is None or pending.done.is_set():
            return
        try:
            pending.accepted = self._gateway.acknowledge(pending.move_id, pending.stamps)
        except MessageRefused as error:
            # The times are optional, the acknowledgement is not.
            self._complain(f"the acknowledgement's stamps were refused: {error}")
            try:
                pending.accepted = self._gateway.acknowledge(pending.move_id, {})
            except MessageRefused as again:
                raise GatewayAway(str(again)) from None
        pending.done.set()

    def pause(self) -> float:
        """Seconds until the next round. They are spread, so that jobs started together do not report together."""
        with self._lock:
            waiting = self._pending is not None and not self._pending.done.is_set()
        if waiting:
            return _ACKNOWLEDGE_RETRY_S
        spread = random.uniform(0.9, 1.1)
        if not self.failures:
            return self._interval_s * spread
        backoff = min(self._interval_s, 1.0) * 2.0 ** min(self.failures - 1, 10)
        return min(backoff, _LONGEST_BACKOFF_S) * spread

    def _complain(self, complaint: str) -> None:
        """Log a trouble once, not at every round."""
        if complaint != self._complaint:
            log.warning("%s; training goes on", complaint)
            self._complaint = complaint

    def _recovered(self) -> None:
        if self.failures:
            log.info("Pollux' gateway answers again")
            self._complaint = ""
        self.failures = 0
