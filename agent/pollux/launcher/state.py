"""Define the events, the actions and the state of node 0's launcher; `machine` says how they follow."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from pollux.launcher.messages import (
    EndWorkers,
    NodesLeft,
    Order,
    RankMessage,
    Refused,
    Signalled,
    Taken,
    WorkerEnded,
)


class Phase(Enum):
    TRAINING = "training"
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
    def after_failure(self) -> EndWorkers:
        return EndWorkers(self.sibling, self.sibling + self.term)

    def after(self, number: int) -> float:
        """From a signal that asks this launcher to end to KILL."""
        return self.stop if number == signal.SIGTERM else self.term

    @property
    def reports(self) -> float:
        """Node 0 waits for the ends of other nodes' workers after a failure."""
        return self.sibling + self.term + 5.0

    @property
    def gone(self) -> float:
        """Node 0 waits for nodes that leave before it starts the others again."""
        return 2 * self.leave + 4.0


@dataclass(frozen=True, slots=True)
class Failure:
    """How a worker, or a node, failed. `at` is a POSIX time, `status` a shell's."""

    at: float
    rank: int
    status: int
    why: str
    where: str

    @property
    def order(self) -> tuple[float, int]:
        """The least of several failures is the first."""
        return self.at, self.rank

    def __str__(self) -> str:
        """One line for the job's log."""
        return f"rank {self.rank} ({self.where}) failed first: {self.why} (exit status {self.status})"


@dataclass(frozen=True, slots=True)
class Resized:
    """The newest move that removed nodes; it is passed to the next start."""

    move_id: int = 0
    """polluxd's number of it; 0 where there was none."""
    left: tuple[str, ...] = ()
    """Slurm's names of the nodes that the move removed."""

    @property
    def environment(self) -> dict[str, str]:
        if not self.move_id:
            return {}
        return {"POLLUX_RESIZED": str(self.move_id), "POLLUX_LEFT": ",".join(self.left)}


@dataclass(frozen=True, slots=True)
class Again:
    """The next start of the workers."""

    nodes: tuple[int, ...]
    """Who takes part, in order, by the numbers of the start before."""
    resized: Resized = Resized()
    asked: bool = False
    """A rank was lost or asked for it: it does not count as a restart after a failure."""
    lost: bool = False
    """A node of the allocation takes no part any more: it was lost."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a start of the workers ended."""

    failure: Failure | None = None
    ended_by: int = 0
    """The signal that asked the job to end."""
    again: Again | None = None

    @property
    def status(self) -> int:
        """Exit status of the launchers."""
        if self.ended_by:
            return 128 + self.ended_by
        return self.failure.status if self.failure is not None else 0


@dataclass(frozen=True, slots=True)
class StartTerms:
    """The nodes, the workers and the rules of one start."""

    workers: tuple[int, ...]
    """Workers of each node."""
    names: tuple[str, ...]
    """What Slurm calls each node."""
    may_restart: bool = False
    may_retry: bool = False
    recovers: bool = False
    """New ranks would restore the training's state after a loss."""
    companion: bool = False
    """The job lends its ranks to another: they may leave at any time."""
    graces: Graces = Graces()


@dataclass(frozen=True, slots=True)
class Now:
    """One instant: by a clock that does not step, and as a POSIX time."""

    clock: float
    posix: float


# -- events ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromNode:
    """A report of another node's launcher, or of node 0's own."""

    node: int
    message: WorkerEnded | Signalled


@dataclass(frozen=True, slots=True)
class FromRank0:
    message: RankMessage


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


Event = FromNode | FromRank0 | NodeGone | ParentGone | Tick


# -- actions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tell:
    """Order the launchers of these nodes; node 0's is this one."""

    nodes: frozenset[int]
    order: Order


@dataclass(frozen=True, slots=True)
class TellRank0:
    message: Taken | Refused | NodesLeft


@dataclass(frozen=True, slots=True)
class Finish:
    """The start is over."""

    outcome: Outcome


Action = Tell | TellRank0 | Finish


@dataclass(frozen=True, slots=True)
class State:
    """What node 0's launcher knows of the running start."""

    running: Mapping[int, frozenset[int]]
    """Each node's workers that run, by local rank."""
    staying: frozenset[int]
    """Nodes that take part in the next start. Nodes keep their numbers until then."""
    connected: frozenset[int]
    """Nodes whose launchers obey, this one among them."""
    resized: Resized
    phase: Phase = Phase.TRAINING
    move_id: int = 0
    """The newest move that was announced."""
    lent: int = 0
    """Ranks of companions in the job."""
    hurried: bool = False
    """The workers that the newest move removes have been given their time to end."""
    failures: tuple[Failure, ...] = ()
    failed: frozenset[int] = frozenset()
    """Nodes with a failure."""
    odd: Failure | None = None
    """The first worker that a move was to end, and that failed otherwise."""
    recovers: bool = False
    """A rank was lost: all others are killed, and start again with what was in memory."""
    orphaned: Failure | None = None
    """The parent is gone."""
    stopped_by: int = 0
    decide_by: float | None = None
    """When to decide without those that have not ended."""

    @property
    def leaving(self) -> frozenset[int]:
        """Nodes that a move removes and whose launchers have not ended yet."""
        return self.connected - self.staying


def begin(terms: StartTerms, resized: Resized) -> State:
    """The state in which the workers start."""
    nodes = frozenset(range(len(terms.workers)))
    return State({node: frozenset(range(terms.workers[node])) for node in nodes}, nodes, nodes, resized)
