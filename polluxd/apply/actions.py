"""The actions that polluxd can take next for a move.

`MoveSettings` sets how long each step may take.
"""

from __future__ import annotations

from dataclasses import dataclass

from polluxd.model import Step

ACKNOWLEDGED_S = 90.0
"""Agents wait 120 s to be killed and then train on: an acknowledgement older than this is stale."""
REPEAT_S = 3.0
"""A requeue that shows no effect is sent again after this time."""
REFUSED_S = 4.0
"""Configured, and Slurm's reason is a refusal: its scheduler has looked at the job by then."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do yet."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Write `draining`, which is the order to the agent."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """`scontrol requeue incomplete`."""


@dataclass(frozen=True, slots=True)
class Configure:
    """Give the pending job its new geometry and let it start.

    Then write `configured`.
    """


@dataclass(frozen=True, slots=True)
class Reach:
    """Write that `step` was reached."""

    step: Step
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Fail:
    """Write `failed`.

    With `keep_back` polluxd first renews the pending job's lease. Otherwise the job could start at a placement that
    the next plan gives to another job. Without `rest` no cooldown begins: the next plan may place the job elsewhere.
    """

    reason: str
    keep_back: bool = False
    rest: bool = True
    undrained: bool = False
    """The job's agent refused a drain, or left it unanswered."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Write `failed` for a move that was taken back, not one that failed.

    The move was withdrawn before it cost the job anything.
    """

    reason: str
    rest: bool
    """Leave the job alone for a cooldown; else the next plan may ask for the same again."""


@dataclass(frozen=True, slots=True)
class RunAgain:
    """Put a job that Slurm could not start back into the queue.

    polluxd had told Slurm to start the job. Then write `failed`.
    """


@dataclass(frozen=True, slots=True)
class Recruit:
    """Write `recruiting`, then tell the agent, which submits a companion job."""


@dataclass(frozen=True, slots=True)
class Place:
    """Give the pending companion its nodes and let it start.

    Then write `configured`.
    """


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Take the nodes that the job no longer uses from it.

    `scontrol update` takes the job's own nodes; cancelling a companion takes the companion's nodes.
    """


Action = Wait | Drain | Requeue | Configure | Reach | Fail | Withdraw | RunAgain | Recruit | Place | GiveBack

PAUSED = "paused by an administrator before the move began"
NOT_BOOTED = "did not boot"
"""Stands in the detail of a move that failed since a node of its target did not boot."""
