"""What can be done next about a move, and how long each step of one may take."""

from __future__ import annotations

from dataclasses import dataclass

from polluxd.model import Step


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounded waits of a move, in seconds (configuration section `realloc`)."""

    planned: float = 60.0
    """GPUs did not come free: the move is dropped and the next cycle plans anew."""
    drain: float = 30.0
    """No acknowledgement of a checkpoint."""
    acknowledged: float = 90.0
    """Agents wait 120 s to be killed and then train on: past this an acknowledgement is stale."""
    requeued: float = 120.0
    start: float = 30.0
    """Configured, free GPUs, and still not running."""
    training: float = 120.0
    """Running (or resized), and no step reported."""
    recruit: float = 60.0
    """Told to grow in place, and no companion job submitted."""
    give_back: float = 60.0
    """Slurm still shows nodes that a shrunk job has left."""
    repeat: float = 3.0
    """A signal or requeue that shows no effect is sent again after this."""


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
