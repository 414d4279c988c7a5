"""What jobs' agents do, as far as polluxd notices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from polluxd.model import JobState, Move, Step
from polluxd.slurm.protocol import Companion

if TYPE_CHECKING:
    from .world import World


@dataclass
class Training:
    """A job of ours as its agent lives it."""

    work_s: float
    """Seconds of training that it needs."""
    done_s: float = 0.0
    saved_s: float = 0.0
    """What its newest checkpoint has."""
    attempt: int = -1
    stopped_at: float | None = None
    """When it acknowledged a drain."""
    stopped_for: int = 0
    """The move of that drain: once polluxd has ended it without a requeue, it trains on."""
    silent: bool = False
    """Its agent hears nothing (a script that never attaches)."""
    able: str = "requeue"
    """How its agent can be resized, as it reports."""
    refuses: bool = False
    """Its agent is not able to, when it comes to it."""
    keeps_gpus: bool = False
    """Its agent answers each drain with a refusal."""
    dies: bool = False
    """Its agent dies of each order to drain."""
    saves: bool = True
    """What it acknowledges is on disk."""
    least: int = 1
    """Fewest GPUs on which its trainer works: on fewer, it fails at its start, and the job goes back to the queue."""
    known_least: int = 1
    """Of these, what it has learnt by a failure."""
    tells: bool = True
    """It reports what it has learnt."""
    nodes: tuple[str, ...] = ()
    """Where its ranks are."""
    lent: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Of these, what companions have lent, by job id."""
    resized: int = 0
    refused: int = 0
    recruited: set[int] = field(default_factory=set)
    """Moves for which it submitted a companion."""

    @property
    def honest(self) -> bool:
        """Whether its agent does what it is asked to."""
        return self.saves and not (self.refuses or self.keeps_gpus or self.silent or self.dies)


def resize(world: World, job_id: int, training: Training, now: float) -> None:
    """Do an agent's part of a move within its allocation, in no time."""
    if any(world.truth(companion).state is not JobState.RUNNING for companion in training.lent):
        # The launcher starts the job's own ranks again, from the newest checkpoint and without companions.
        lent = {name for nodes in training.lent.values() for name in nodes}
        training.nodes, training.lent = tuple(n for n in training.nodes if n not in lent), {}
        training.done_s = training.saved_s
    if world.rows.down:
        return
    for move in world.rows.moves:
        if move.job_id != job_id or move.attempt != training.attempt or not move.in_allocation:
            continue
        if move.step in (Step.DRAINING, Step.RECRUITING) and training.refuses:
            training.refused = move.id
        elif move.step is Step.DRAINING:
            training.nodes = move.target.nodes
            training.lent = {c: n for c, n in training.lent.items() if set(n) <= set(move.target.nodes)}
            training.resized = move.id
            training.saved_s = training.done_s
            world.rows.acknowledge(move.id, world.wall())
        elif move.grows and not move.step.terminal:
            _recruit(world, job_id, training, move, now)


def _recruit(world: World, job_id: int, training: Training, move: Move, now: float) -> None:
    claim, parent = Companion(job_id, training.attempt, move.id, move.nonce), world.truth(job_id)
    mine = [
        c for c in world.companions if world.truth(c).companion == claim and world.truth(c).uid == parent.uid
    ]
    if move.step is Step.RECRUITING and move.id not in training.recruited:
        training.recruited.add(move.id)
        nodes, gpus = len(move.added.nodes), move.added.gpus_per_node
        world.submit_companion(claim, nodes, gpus, user=parent.user, uid=parent.uid)
    for companion in mine:
        shown = world.truth(companion)
        runs = shown.state is JobState.RUNNING and now > shown.start_time + 1.0
        if runs and set(shown.nodes) == set(move.added.nodes) and training.resized != move.id:
            training.lent[companion] = shown.nodes
            training.nodes = move.target.nodes
            training.resized = move.id
            training.saved_s = training.done_s
