"""Define the state, the events and the actions of a node's launcher.

`machine` says how they follow from each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pollux.launcher.messages import LauncherMessage, MoveNotice, RankMessage
from pollux.launcher.outcome import Failure, Outcome, Resized


class Phase(Enum):
    TRAINING = "training"
    ASKING = "asking"
    LEAVING = "leaving"
    FAILING = "failing"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Graces:
    """How long things may take, in seconds."""

    sibling: float = 3.0
    """Workers live on after another has failed, to print why they fail."""
    term: float = 10.0
    """From TERM to KILL: within Slurm's default KillWait of 30 s, so workers end before the launcher is killed."""
    stop: float = 600.0
    """From a SIGTERM that asks this launcher to end to KILL: workers write their last checkpoint. Slurm, torchrun or
    Kubernetes end all of them sooner, when their own grace period is over."""
    leave: float = 8.0
    """Workers that a move removes may end by themselves, from the first one's end or from when rank 0 waits for them.
    With as long again from TERM to KILL, all are gone before rank 0 stops waiting and Slurm takes their node."""

    @property
    def reports(self) -> float:
        """Node 0 waits for the other nodes' reports of a failure."""
        return self.sibling + self.term + 5.0

    @property
    def gone(self) -> float:
        """Node 0 waits for nodes that leave before it starts the others again."""
        return 2 * self.leave + 4.0


@dataclass(frozen=True, slots=True)
class StartTerms:
    """The nodes, the workers and the rules of one start."""

    node: int
    workers: tuple[int, ...]
    """Workers of each node."""
    names: tuple[str, ...]
    """What Slurm calls each node."""
    where: str
    """This node, in messages."""
    may_restart: bool = False
    may_retry: bool = False
    recovers: bool = False
    """On node 0: new ranks would restore the training's state after a loss."""
    companion: bool = False
    """The job lends its ranks to another: they may leave at any time."""
    graces: Graces = Graces()

    @property
    def hub(self) -> bool:
        return self.node == 0


@dataclass(frozen=True, slots=True)
class Now:
    """One instant: by a clock that does not step, and as a POSIX time."""

    clock: float
    posix: float


@dataclass(frozen=True, slots=True)
class End:
    """A worker's end.

    `status` is a shell's; `why` what the worker said of its failure, `said_at` when.
    """

    status: int
    at: float
    why: str | None = None
    said_at: float = 0.0
    pid: int = 0


# -- events ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    local_rank: int
    end: End


@dataclass(frozen=True, slots=True)
class Signalled:
    number: int


@dataclass(frozen=True, slots=True)
class FromRank0:
    message: RankMessage


@dataclass(frozen=True, slots=True)
class FromNode:
    node: int
    message: LauncherMessage


@dataclass(frozen=True, slots=True)
class NodeGone:
    """The connection to a node's launcher has ended."""

    node: int


@dataclass(frozen=True, slots=True)
class ParentGone:
    """The job that this companion lends to has ended."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = WorkerEnded | Signalled | FromRank0 | FromNode | NodeGone | ParentGone | Tick


# -- actions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SignalWorkers:
    number: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Send to all connected launchers."""

    message: LauncherMessage


@dataclass(frozen=True, slots=True)
class TellRank0:
    message: RankMessage


@dataclass(frozen=True, slots=True)
class Finish:
    """The start is over.

    On node 0 the others hear of it; a next start's port is to be chosen.
    """

    outcome: Outcome
    tell: bool = False


Action = SignalWorkers | Tell | TellRank0 | Finish


# -- the state ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LauncherState:
    """What a launcher knows of the running start."""

    first_rank: int
    """Rank of this node's first worker, as the agent counts now."""
    running: frozenset[int]
    """Workers that run, by local rank."""
    staying: frozenset[int]
    """Nodes that take part in the next start. Nodes keep their numbers until then."""
    connected: frozenset[int]
    """Nodes whose launchers can be told something."""
    resized: Resized
    phase: Phase = Phase.TRAINING
    ended: Mapping[int, End] = field(default_factory=dict)
    """Workers that have ended, by local rank."""
    move: MoveNotice | None = None
    """The newest one that was announced."""
    grace_begun: bool = False
    """Of the workers that the newest move removes."""
    leaving: frozenset[int] = frozenset()
    """On node 0: nodes that a move removes and whose launchers have not ended yet."""
    reports: Mapping[int, Failure | None] = field(default_factory=dict)
    """On node 0: what each node has reported at its end."""
    reported: bool = False
    recovers: bool = False
    """A rank was lost: all others are killed, and start again with what was in memory."""
    lost: Failure | None = None
    """Node 0's launcher is gone."""
    orphaned: Failure | None = None
    """The parent is gone."""
    stopped_by: int = 0
    decided: Outcome | None = None
    """What node 0 has decided."""
    term_at: float | None = None
    kill_at: float | None = None
    decide_by: float | None = None
    ended_from: float = math.inf
    killed_from: float = math.inf
    """When this launcher began to end workers itself, and to kill them; POSIX times."""

    @property
    def due(self) -> float | None:
        """When the next Tick is due."""
        times = [at for at in (self.term_at, self.kill_at, self.decide_by) if at is not None]
        return min(times, default=None)
