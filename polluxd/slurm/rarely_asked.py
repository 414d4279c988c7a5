"""What changes rarely in Slurm, and is therefore asked for rarely."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping

from polluxd.errors import SlurmError
from polluxd.slurm.limits import Limits, parse_limits
from polluxd.slurm.rules import parse_preemption
from polluxd.slurm.topology import parse_topology

log = logging.getLogger(__name__)

TOPOLOGY_S = 300.0
"""Racks and abilities change with slurm.conf: they are asked for no more often than this."""

LIMITS_S = 30.0
"""Limits change by hand, and a large site has tens of thousands: they are asked for no more often than this."""

_LIMITS = re.compile(r"^AccountingStorageEnforce\s*=.*\b(?:limits|safe)\b", re.MULTILINE)
_PREEMPT_QOS = re.compile(r"^PreemptType\s*=\s*preempt/qos\s*$", re.MULTILINE)


class RarelyAsked:
    """Slurm's configuration, racks, limits and preemption, as last heard.

    An answer that fails leaves the last one in effect: no error of these readings ends an observation.

    Args:
        run: runs a command line and returns what it printed.
        clock: POSIX time [s].
    """

    def __init__(self, run: Callable[..., str], clock: Callable[[], float]) -> None:
        self._run = run
        self._clock = clock
        self._configured = ""
        self._configured_at: float | None = None
        self._limits = Limits()
        self._unreadable_limits: Mapping[str, str] = {}
        self._limits_at: float | None = None
        self._preempts: Mapping[str, frozenset[str]] = {}
        self._preempts_at: float | None = None
        self._rack: Mapping[str, str] = {}
        self._racks_at: float | None = None

    def configuration(self) -> str:
        """Return the answer of `scontrol show config`."""
        if self._due(self._configured_at, TOPOLOGY_S):
            self._configured_at = self._clock()
            try:
                self._configured = self._run("scontrol", "show", "config")
            except SlurmError as error:
                log.warning("Slurm's configuration is as it was known before: %s", error)
        return self._configured

    def racks(self) -> Mapping[str, str]:
        """Return the leaf switch of each node."""
        if self._due(self._racks_at, TOPOLOGY_S):
            self._racks_at = self._clock()
            try:
                self._rack = parse_topology(self._run("scontrol", "show", "topology"))
            except SlurmError as error:
                log.warning("racks are as they were known before (%d nodes): %s", len(self._rack), error)
        return self._rack

    def limits(self) -> tuple[Limits, Mapping[str, str]]:
        """Return the limits of accounting, and those that make no sense.

        Slurm itself holds jobs to its limits.
        """
        if not _LIMITS.search(self.configuration()):
            self._limits, self._unreadable_limits, self._limits_at = Limits(), {}, None
        elif self._due(self._limits_at, LIMITS_S):
            self._limits_at = self._clock()
            try:
                text = self._run("scontrol", "-o", "show", "assoc_mgr", "flags=assoc,qos")
                self._limits, self._unreadable_limits = parse_limits(text)
            except SlurmError as error:
                log.warning("limits of accounts and QOSes are as they were known before: %s", error)
        return self._limits, self._unreadable_limits

    def preemption(self) -> Mapping[str, frozenset[str]]:
        """Return, by QOS, the QOSes that it preempts.

        slurmdbd answers: slurmctld shows no such list.
        """
        if not _PREEMPT_QOS.search(self.configuration()):
            self._preempts, self._preempts_at = {}, None
        elif self._due(self._preempts_at, LIMITS_S):
            self._preempts_at = self._clock()
            command = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=name,preempt")
            try:
                self._preempts = parse_preemption(self._run(*command))
            except SlurmError as error:
                log.warning("which QOS preempts which is as it was known before: %s", error)
        return self._preempts

    def _due(self, asked_at: float | None, every: float) -> bool:
        return asked_at is None or not 0 <= self._clock() - asked_at < every
