"""What can be done next about a move. How long each step may take is set in `MoveSettings`."""

from __future__ import annotations

from dataclasses import dataclass

from polluxd.model import Step

ACKNOWLEDGED_S = 90.0
"""Agents wait 120 s to be killed and then train on: an acknowledgement older than this is stale."""
REPEAT_S = 3.0
"""A signal or requeue that shows no effect is sent again after this time."""
REFUSED_S = 4.0
"""Configured, and Slurm's reason is a refusal: its scheduler has looked at the job by then."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do yet."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Write `draining`, then tell the agent."""


@dataclass(frozen=True, slots=True)
class Remind:
    """Tell the agent again."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """`scontrol requeue incomplete`."""


@dataclass(frozen=True, slots=True)
class Configure:
    """Give the pending job its new geometry and let it start; then write `configured`."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Write that `step` was reached."""

    step: Step
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Fail:
    """Write `failed`; with `keep_back` the pending job gets its lease back first, so that it does not start at a
    placement that the next plan gives to another."""

    reason: str
    keep_back: bool = False


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Write `failed`, though nothing failed: somebody took the move back before it cost anything."""

    reason: str
    rest: bool
    """Leave the job alone for a cooldown; else the next plan may ask for the same again."""


@dataclass(frozen=True, slots=True)
class RunAgain:
    """Slurm could not start the job that it had been told to start: put it back into the queue, and write `failed`."""


@dataclass(frozen=True, slots=True)
class Recruit:
    """Write `recruiting`, then tell the agent, which submits a companion job."""


@dataclass(frozen=True, slots=True)
class Place:
    """Give the companion that waits its nodes and let it start; then write `configured`."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Take the nodes that the job has left from it: its own by `scontrol update`, companions by cancelling them."""


Action = (
    Wait
    | Drain
    | Remind
    | Requeue
    | Configure
    | Reach
    | Fail
    | Withdraw
    | RunAgain
    | Recruit
    | Place
    | GiveBack
)

PAUSED = "paused by an administrator before the move began"
