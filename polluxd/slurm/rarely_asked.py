"""What changes rarely in Slurm, and is therefore asked for rarely."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from polluxd.errors import SlurmError
from polluxd.slurm.limits import Limits, parse_limits
from polluxd.slurm.rules import parse_preemption
from polluxd.slurm.topology import parse_topology

_T = TypeVar("_T")

log = logging.getLogger(__name__)

TOPOLOGY_S = 300.0
"""Racks and abilities change with slurm.conf: they are asked for no more often than this."""

LIMITS_S = 30.0
"""Limits change by hand, and a large site has tens of thousands: they are asked for no more often than this, and before
a training is stopped. Slurm shows some of a QOS only once a user has a job there."""

ARRAY_S = 10.0
"""A throttle is changed by hand: it is asked for no more often than this."""

_LIMITS = re.compile(r"^AccountingStorageEnforce\s*=.*\b(?:limits|safe)\b", re.MULTILINE)
_QOS = re.compile(r"^AccountingStorageEnforce\s*=.*\bqos\b", re.MULTILINE)
_CLUSTER = re.compile(r"^ClusterName\s*=\s*(\S+)$", re.MULTILINE)
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
        self._known: dict[str, tuple[float, Any]] = {}
        """What was asked: when, and the last answer."""

    def configuration(self) -> str:
        """Return the answer of `scontrol show config`."""
        return self._kept("Slurm's settings", TOPOLOGY_S, "", lambda: self._run("scontrol", "show", "config"))

    def racks(self) -> Mapping[str, str]:
        """Return the leaf switch of each node."""
        return self._kept(
            "racks", TOPOLOGY_S, {}, lambda: parse_topology(self._run("scontrol", "show", "topology"))
        )

    def limits(self) -> tuple[Limits, Mapping[str, str]]:
        """Return the limits of accounting, and those that make no sense.

        Slurm itself holds jobs to its limits.
        """
        none: tuple[Limits, Mapping[str, str]] = Limits(), {}
        enforced = _LIMITS.search(self.configuration())
        if enforced is None:
            self._known.pop("limits", None)
            return none
        command = ("scontrol", "-o", "show", "assoc_mgr", "flags=assoc,qos")
        return self._kept(
            "limits", LIMITS_S, none, lambda: parse_limits(self._run(*command), safe="safe" in enforced[0])
        )

    def ask_limits(self) -> None:
        """Read the limits the next time."""
        if "limits" in self._known:
            self._known["limits"] = float("-inf"), self._known["limits"][1]

    def array(self, number: int) -> str:
        """Return what Slurm shows of an array. What was not asked for lately is forgotten."""
        now = self._clock()
        self._known = {
            what: known
            for what, known in self._known.items()
            if not what.startswith("array ") or 0 <= now - known[0] < ARRAY_S
        }
        command = ("scontrol", "--local", "-o", "show", "job", str(number))
        return self._kept(f"array {number}", ARRAY_S, "", lambda: self._run(*command))

    def preemption(self) -> Mapping[str, frozenset[str]]:
        """Return, by QOS, the QOSes that it preempts.

        slurmdbd answers: slurmctld shows no such list.
        """
        if not _PREEMPT_QOS.search(self.configuration()):
            self._known.pop("rules of preemption", None)
            return {}
        command = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=name,preempt")
        return self._kept("rules of preemption", LIMITS_S, {}, lambda: parse_preemption(self._run(*command)))

    def qos_of(self, user: str, account: str) -> frozenset[str]:
        """Return the QOSes that Slurm lets jobs of a user in an account have; none: all, or nobody says.

        slurmdbd answers: slurmctld shows no such list.
        """
        cluster = _CLUSTER.search(self.configuration())
        if not cluster or not _QOS.search(self.configuration()):
            return frozenset()
        where = (f"cluster={cluster[1]}", f"user={user}", f"account={account}")
        try:
            text = self._run("sacctmgr", "-nP", "show", "assoc", "where", *where, "format=qos")
        except SlurmError as error:
            log.warning("it is not known which QOSes user %s has: %s", user, error)
            return frozenset()
        return frozenset(re.split(r"[,\n]", text)) - {""}

    def _kept(self, what: str, every: float, none: _T, read: Callable[[], _T]) -> _T:
        """Return an answer that is at most `every` seconds old, or the last one where there is no new one."""
        asked_at, answer = self._known.get(what, (float("-inf"), none))
        now = self._clock()
        if not 0 <= now - asked_at < every:
            try:
                answer = read()
            except SlurmError as error:
                log.warning("%s are as they were known before: %s", what, error)
            self._known[what] = now, answer
        return cast("_T", answer)
