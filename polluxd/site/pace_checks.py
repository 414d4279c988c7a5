"""Checks of slurm.conf's settings that bound how fast polluxd can act, and how long Slurm remembers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from polluxd.config.config_file import Config
from polluxd.config.settings import MoveSettings

from .findings import Finding, warning

SHORTEST_MEMORY_S = 60
"""slurmctld forgets ended jobs after MinJobAge (slurm.conf(5): 300 s). polluxd may miss some looks in a row."""
SHORTEST_DELAY_S = 30
"""A requeued job that starts by itself sooner comes before polluxd's placement."""


def pace(settings: Mapping[str, str], config: Config | None) -> Iterator[Finding]:
    """Check intervals, delays and what slurmdbd counts."""
    moves = config.moves if config is not None else MoveSettings()
    yield from _memory(settings)
    yield from _scheduler(settings, moves)
    yield from _scripts(settings, moves)
    yield from _requeue(settings)
    dbd = settings.get("AccountingStorageType") == "accounting_storage/slurmdbd"
    if dbd and "gres/gpu" not in settings.get("AccountingStorageTRES", "").split(","):
        yield warning(
            "accounting",
            f"AccountingStorageTRES is {settings.get('AccountingStorageTRES') or 'not set'}: Slurm counts no GPUs, and "
            "limits on gres/gpu hold nobody back",
            "AccountingStorageTRES=gres/gpu in slurm.conf, and restart slurmctld",
        )


def _memory(settings: Mapping[str, str]) -> Iterator[Finding]:
    age = _seconds(settings.get("MinJobAge", ""))
    if age is not None and age < SHORTEST_MEMORY_S:
        yield warning(
            "memory",
            f"MinJobAge is {age:g} s: slurmctld forgets a job before polluxd has seen its end, and the job counts as "
            "GONE",
            "MinJobAge=300 in slurm.conf, and scontrol reconfigure",
        )


def _scheduler(settings: Mapping[str, str], moves: MoveSettings) -> Iterator[Finding]:
    found = dict(re.findall(r"(\w+)=(\d+)", settings.get("SchedulerParameters", "")))
    # In microseconds (slurm.conf(5)).
    least = int(found.get("sched_min_interval", 2)) / 1e6
    slowest = max(least, float(found.get("batch_sched_delay", 3)))
    if slowest > moves.start_timeout_s / 3:
        yield warning(
            "scheduler",
            f"slurmctld may wait {slowest:g} s before it starts a job (SchedulerParameters), and polluxd gives a start "
            f"up after moves.start_timeout_s = {moves.start_timeout_s:g} s",
            f"lower sched_min_interval and batch_sched_delay, or set start_timeout_s = {3 * slowest:g} in [moves]",
        )


def _scripts(settings: Mapping[str, str], moves: MoveSettings) -> Iterator[Finding]:
    """Compare the time of the site's own scripts with polluxd's; without a limit they may take any time."""
    if not any(settings.get(key) for key in ("Prolog", "Epilog", "PrologSlurmctld", "TaskProlog")):
        return
    limit = _seconds(settings.get("PrologEpilogTimeout", ""))
    if limit is not None and 0 < limit < 65534 and limit > moves.training_timeout_s:
        yield warning(
            "scripts",
            f"PrologEpilogTimeout is {limit:g} s, and a start without a training step counts as failed after "
            f"moves.training_timeout_s = {moves.training_timeout_s:g} s",
            f"lower PrologEpilogTimeout, or set training_timeout_s = {limit + 60:g} in [moves]",
        )
    elif limit is not None and 0 < limit < 10:
        yield warning(
            "scripts",
            f"PrologEpilogTimeout is {limit:g} s: a prolog that a busy node delays drains the node",
            "PrologEpilogTimeout=60 or more in slurm.conf, and scontrol reconfigure",
        )


def _requeue(settings: Mapping[str, str]) -> Iterator[Finding]:
    """Slurm 25.11 and newer: how soon a requeued job starts again by itself."""
    words = ",".join(settings.get(key, "") for key in ("SchedulerParameters", "SlurmctldParameters"))
    found = re.search(r"\brequeue_delay=(\d+)", words)
    if found and int(found[1]) < SHORTEST_DELAY_S:
        yield warning(
            "requeue",
            f"requeue_delay is {found[1]} s: a requeued job starts again by itself, before polluxd has placed it",
            f"requeue_delay={SHORTEST_DELAY_S} or more in slurm.conf, or leave it out",
        )


def _seconds(text: str) -> float | None:
    """Seconds of `300 sec` or `300`; None: not set, or unlimited."""
    found = re.match(r"(\d+)\b", text)
    return float(found[1]) if found else None
