"""What the state machine of a move (`machine`) sees, and what it may tell the reconciler to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf

from polluxd.apply.capacity import Capacity
from polluxd.config.settings import MoveSettings
from polluxd.model import Move, Report, Step
from polluxd.slurm.protocol import SlurmJob

PAUSED = "paused by an administrator before the move began"
JOINER_FAILED = "a joiner's script has ended before its training"
"""What the agent's refusal of a growth begins with if the script failed on the further nodes."""
REFUSED_START, REFUSED_SIZE = "Slurm refuses to start it there", "Slurm refused the new size"
"""What the detail of a move has that Slurm refused after its job was requeued; a colon and the reason follow."""
WAITED, WENT_BACK = "it waited for ", "it went back to the queue before its first step"
"""What such a reason begins with where nobody told one."""
NOT_BOOTED = "did not boot: "
"""What a sentence of the detail begins with if nodes of the target did not boot; their names follow."""


def sentences(detail: str) -> list[str]:
    """Return what polluxd has written of a move: what an agent said stands within one, and begins none."""
    return detail.split("; ")


class Do(Enum):
    """The actions that need no further words."""

    WAIT = "nothing to do yet"
    DRAIN = "write `draining`, which is the order to the agent"
    REQUEUE = "`scontrol requeue incomplete`"
    CONFIGURE = "give the pending job its new geometry and let it start; then write `configured`"
    RUN_AGAIN = "put a job that Slurm could not start back into the queue; then write `failed`"
    RECRUIT = "write `recruiting`: the agent submits a companion job"
    PLACE = "give the pending companion its nodes and let it start; then write `configured`"
    GIVE_BACK = "take the nodes that the job no longer uses: of its own ones, and by cancelling companions"


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
    refused: str = ""
    """Why Slurm does not start the job, or its companion, at the target."""
    alone: str = ""
    """Why the job's script does not run on further nodes."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Write `failed` for a move that was taken back before it cost the job anything."""

    reason: str
    rest: bool = False
    """Leave the job alone for a cooldown; else the next plan may ask for the same again."""
    undrained: bool = False
    """The job's user has taken the move back, which would have given GPUs back: as good as a drain refused."""


Action = Do | Reach | Fail | Withdraw


@dataclass(frozen=True, slots=True)
class Situation:
    """What the next action of a move depends on."""

    move: Move
    job: SlurmJob | None
    report: Report | None
    room: Capacity
    limits: MoveSettings
    now: float
    """POSIX time [s]."""
    waited: float
    """How long the move has been at its step [s], by a clock that does not step."""
    since_try: float = inf
    """How long ago polluxd sent the last requeue or shrink [s], by a clock that does not step."""
    companion: SlurmJob | None = None
    """The job that was submitted for the move, where the move grows a job in place."""
    forbidden: str = ""
    """The rule by which Slurm would not start the job at the move's target (`startable.forbids`)."""
    kept_off: bool = False
    """Slurm must not start the job on its target yet: its last attempt ran there (`FormerNodes`)."""
    owed: bool = False
    """It gives back what its user's protection does not cover (`protected`), even if it could not start again."""
    most: int | None = None
    """GPUs that its user's protection covers, where others lack some that it holds, or that are set aside for it."""
    insist: bool = False
    """Requeue the job even if its agent does not drain it: it is owed, and was asked before."""
    paused: bool = False
