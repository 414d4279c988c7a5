"""Who leads: a row with a lease elects, an epoch fences every write.

Agents cannot touch the row. A leader renews its lease in a thread of its own, so that a long cycle does not end its
lead. A leader that stalls (stopped, swapped out, cut off) may wake after its lease has ended and another leads: its
writes are then refused by the epoch, and it knows by itself that the lease has ended, because it counts from before
the last renewal on a clock that runs through suspension.

A new leader waits for the end of the lease even when the old leader is known to be dead: a command that the old leader
sent to Slurm may still run.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import Any

import psycopg2

from .connection import Connector, our_errors
from .sqlfiles import queries

log = logging.getLogger(__name__)

# Goes on while the machine is suspended, which CLOCK_MONOTONIC does not.
_CLOCK = time.CLOCK_BOOTTIME
TROUBLE = "polluxd in trouble:"
"""Begins the name of a leader's session that takes no action; epoch, reason and cluster follow."""


class Leadership:
    """This process's candidacy for one cluster. For several threads.

    Args:
        lease_s: how long a leader may act after its last renewal; a new leader waits for it to end [s].
    """

    def __init__(self, connector: Connector, cluster: str, *, lease_s: float) -> None:
        self.cluster = cluster
        self.lease_s = lease_s
        self.epoch: int | None = None
        self.holder = f"{socket.gethostname()}:{os.getpid()}"
        self._connector = connector
        self._connection: Any = None
        self._told = ""
        self._confirmed_at = float("-inf")
        self._lock = threading.Lock()
        self._renewing = threading.Event()

    @property
    def lease_left(self) -> float:
        """Seconds for which this process may still act without asking again; 0 where it does not lead."""
        if self.epoch is None:
            return 0.0
        return max(0.0, self._confirmed_at + self.lease_s - time.clock_gettime(_CLOCK))

    def lead(self) -> int | None:
        """Take or keep the lead; return the epoch, or None while another's lease runs. Raises StoreError."""
        with self._lock, our_errors(self._connector.place, self._connector.failed):
            if self.epoch is not None:
                if self._renew():
                    return self.epoch
                self._give_up()
            return self._claim()

    def still_leading(self) -> bool:
        """Ask whether this process leads, and renew the lease; False also where the database does not answer."""
        with self._lock:
            if self.epoch is None:
                return False
            try:
                leading = self._renew()
            except psycopg2.Error as error:
                self._say_unrenewed(error)
                return False
            if not leading:
                self._give_up()
            return leading

    def tell(self, trouble: str) -> None:
        """Show `status` why the leader takes no action, until told otherwise (""). Never raises.

        It is the name of the leader's session, since a database that is full can keep no row.
        """
        with self._lock:
            if trouble == self._told or self._connection is None or self._connection.closed:
                return
            try:
                with self._connection.cursor() as cursor:
                    cursor.execute(
                        "SET application_name = %s",
                        (f"{TROUBLE}{self.epoch}:{trouble}:{self.cluster}" if trouble else "polluxd",),
                    )
            except psycopg2.Error:
                self._disconnect()
            else:
                self._told = trouble

    def resign(self) -> None:
        """Stop leading, so that another may act at once. Never raises."""
        with self._lock:
            if self.epoch is not None:
                try:
                    self._query("lead_resign", epoch=self.epoch)
                except psycopg2.Error as error:
                    log.warning("could not resign as leader (%s): the lease ends by itself", error)
            self._give_up()

    def _claim(self) -> int | None:
        asked_at = time.clock_gettime(_CLOCK)
        try:
            rows = self._query("lead_claim", holder=self.holder, lease_s=self.lease_s)
        except psycopg2.Error:
            self._give_up()
            raise
        if not rows:
            return None
        self.epoch = int(rows[0][0])
        self._confirmed_at = asked_at
        log.info("leading cluster %s as epoch %d", self.cluster, self.epoch)
        self._renewing = threading.Event()
        threading.Thread(
            target=self._keep_renewing, args=(self._renewing,), name="pollux-lease", daemon=True
        ).start()
        return self.epoch

    def _keep_renewing(self, ended: threading.Event) -> None:
        """Renew until the lead ends. A database that is away is asked again."""
        while not ended.wait(self.lease_s / 3):
            with self._lock:
                if ended.is_set():
                    return
                try:
                    if not self._renew():
                        self._give_up()
                except psycopg2.Error as error:
                    self._say_unrenewed(error)

    def _renew(self) -> bool:
        """Extend the lease; False when another epoch leads. Raises psycopg2.Error."""
        asked_at = time.clock_gettime(_CLOCK)
        try:
            rows = self._query("lead_renew", epoch=self.epoch, lease_s=self.lease_s)
        except psycopg2.Error:
            self._disconnect()
            raise
        if rows:
            self._confirmed_at = asked_at
        else:
            log.warning("epoch %s no longer leads cluster %s", self.epoch, self.cluster)
        return bool(rows)

    def _say_unrenewed(self, error: psycopg2.Error) -> None:
        self._connector.failed("unavailable")
        log.warning(
            "the lease of cluster %s was not renewed and runs for %.1f s more: %s",
            self.cluster,
            self.lease_left,
            str(error).strip(),
        )

    def _query(self, name: str, **parameters: object) -> list[tuple[Any, ...]]:
        if self._connection is None or self._connection.closed:
            self._connection, self._told = self._connector.open(), ""
            self._connection.autocommit = True
        text = queries()[name]
        for word in ("cluster", *parameters):
            text = text.replace(f":{word}", f"%({word})s")
        with self._connection.cursor() as cursor:
            cursor.execute(text, {"cluster": self.cluster, **parameters})
            return list(cursor.fetchall()) if cursor.description else []

    def _give_up(self) -> None:
        self.epoch = None
        self._confirmed_at = float("-inf")
        self._renewing.set()
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            try:
                self._connection.close()
            except psycopg2.Error:
                log.debug("the leader's connection was gone already")
            self._connection = None
