"""The verdict of `polluxctl status`, and its exit status. Pure."""

from __future__ import annotations

from calendar import timegm
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import strptime
from typing import Any

from polluxd.apply.idle_watch import PREFIX as IDLE
from polluxd.apply.refusals import STUCK
from polluxd.apply.stopwatch import in_step_since, stuck_moves
from polluxd.config.settings import CycleSettings, MoveSettings
from polluxd.model import Move

from .output import clock, duration

INTERVALS = 3
"""A leader that has not decided for so many intervals is late."""


@dataclass(frozen=True, slots=True)
class Health:
    """Whether polluxd works, and since when it does not.

    Exit status 0: it works. 1: it does not decide. 2: a move is stuck, Slurm refuses to start jobs, decisions take
    longer than the interval, or GPUs idle beside a job that may use them.
    """

    exit_status: int
    message: str
    stuck_since: float | None = None
    """When the oldest stuck move entered its step, Slurm first refused, or the GPUs became idle."""


def health(
    status: Mapping[str, Any], moves: Sequence[Move], cycle: CycleSettings, limits: MoveSettings, now: float
) -> Health:
    """Judge the newest decision and the moves under way."""
    if status["leader"] is None or not status["leading"]:
        return Health(1, "no polluxd leads: look at `systemctl status polluxd` on the controller")
    decided = status["decided_at"]
    if decided is None:
        return Health(1, "polluxd leads and has not decided yet")
    if now - decided > INTERVALS * cycle.interval_s:
        return Health(
            1,
            f"the last decision is {duration(now - decided)} old, expected one every {duration(cycle.interval_s)}: "
            "look at polluxd's log",
        )
    stuck = stuck_moves(moves, limits, now)
    if stuck and not status["paused"]:
        move, since = stuck[0], in_step_since(stuck[0])
        return Health(
            2,
            f"stuck since {clock(since)}: the move of job {move.job_id} to {move.target} is still {move.step.value} "
            f"(`polluxctl moves {move.job_id}`)",
            since,
        )
    refusal = str(status.get("note") or "").partition("; ")[0]
    if refusal.startswith(STUCK):
        since_text = refusal.removeprefix(STUCK)[: len("2027-01-15 08:00:00")]
        return Health(2, refusal, timegm(strptime(since_text, "%Y-%m-%d %H:%M:%S")))
    took = sum(dict(status.get("durations") or {}).values())
    if took > cycle.interval_s:
        return Health(
            2,
            f"the last decision took {duration(took)}, longer than cycle.interval_s ({duration(cycle.interval_s)}): "
            "raise the interval, or look at polluxd's log for what is slow",
        )
    idle = next((part for part in str(status.get("note") or "").split("; ") if part.startswith(IDLE)), "")
    if idle:
        since_text = idle.removeprefix(IDLE)[: len("2027-01-15 08:00:00")]
        return Health(2, idle, timegm(strptime(since_text, "%Y-%m-%d %H:%M:%S")))
    return Health(0, "paused: polluxd moves nothing until `polluxctl resume`" if status["paused"] else "ok")
