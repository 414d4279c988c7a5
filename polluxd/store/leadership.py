"""Who leads: an advisory lock elects, an epoch fences every write, a lease bounds a stalled leader.

The lock lives as long as its session. A leader that stalls (stopped, swapped out, cut off) may lose its
session and wake later; its writes are then refused by the epoch, and its lease, counted from before the last
renewal on a clock that runs through suspension, has ended before another leader may begin. Needs a session of
its own: a pooler in transaction mode must not stand between.

The lease is waited for even when the old leader is known to be dead: a scontrol of his may still be running.
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


class Leadership:
    """This process's candidacy for one cluster.

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
        self._confirmed_at = float("-inf")
        self._lock = threading.Lock()

    @property
    def lease_left(self) -> float:
        """Seconds for which this process may still act without asking again; 0 when it does not lead."""
        if self.epoch is None:
            return 0.0
        return max(0.0, self._confirmed_at + self.lease_s - time.clock_gettime(_CLOCK))

    def lead(self) -> int | None:
        """Lead or go on leading: the epoch; None while another leads, or led until less than a lease ago.

        Raises:
            StoreUnavailable, StoreRejected.
        """
        with self._lock:
            if self.epoch is not None and self._renew():
                return self.epoch
            self._give_up()
            with our_errors(self._connector.place):
                return self._claim()

    def still_leading(self) -> bool:
        """Ask the database whether this process leads, and renew the lease; False also when it is silent."""
        with self._lock:
            if self.epoch is None:
                return False
            if self._renew():
                return True
            self._give_up()
            return False

    def resign(self) -> None:
        """Stop leading in good order, so that another may act at once. Never raises."""
        with self._lock:
            if self.epoch is not None:
                try:
                    self._query("lead_resign", epoch=self.epoch)
                except psycopg2.Error as error:
                    log.warning("could not resign as leader (%s): the lease lapses by itself", error)
            self._give_up()

    def _claim(self) -> int | None:
        asked_at = time.clock_gettime(_CLOCK)
        self._connection = self._connector.open()
        self._connection.autocommit = True
        try:
            with self._connection.cursor() as cursor:
                cursor.execute(
                    "SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", ("pollux:" + self.cluster,)
                )
                elected = cursor.fetchone()[0]
            if elected:
                rows = self._query("lead_claim", holder=self.holder, lease_s=self.lease_s)
            else:
                rows = []
                if self._query("lead_evict"):
                    log.warning(
                        "ended the session of a leader of cluster %s whose lease is over", self.cluster
                    )
        except psycopg2.Error:
            self._give_up()
            raise
        if not rows:
            self._give_up()
            return None
        self.epoch = int(rows[0][0])
        self._confirmed_at = asked_at
        log.info("leading cluster %s as epoch %d", self.cluster, self.epoch)
        return self.epoch

    def _renew(self) -> bool:
        asked_at = time.clock_gettime(_CLOCK)
        try:
            rows = self._query("lead_renew", epoch=self.epoch, lease_s=self.lease_s)
        except psycopg2.Error as error:
            log.warning("leadership of cluster %s is lost: %s", self.cluster, str(error).strip())
            return False
        if rows:
            self._confirmed_at = asked_at
        return bool(rows)

    def _query(self, name: str, **words: object) -> list[tuple[Any, ...]]:
        text = queries()[name]
        for word in ("cluster", *words):
            text = text.replace(f":{word}", f"%({word})s")
        with self._connection.cursor() as cursor:
            cursor.execute(text, {"cluster": self.cluster, **words})
            return list(cursor.fetchall()) if cursor.description else []

    def _give_up(self) -> None:
        self.epoch = None
        self._confirmed_at = float("-inf")
        if self._connection is not None:
            try:
                self._connection.close()
            except psycopg2.Error:
                log.debug("the leader's connection was gone already")
            self._connection = None
