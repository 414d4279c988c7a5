"""Resize a job in place: on every rank, after the same optimizer step.

Leaving ranks end their processes. If the model is under fully_shard, they first send their shards to the other ranks.
The other ranks and the joiners of a companion job form new groups over a store in rank 0's process. They go on in the
middle of the pass.

Until all ranks know the decision, the resize can still be abandoned. After that, the death of a rank ends all ranks,
and they restart from the checkpoint of that step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from pollux.checkpoint.checkpointer import Checkpointer
from pollux.loop.notices import in_words, notice, of_gpus
from pollux.ranks.control import ControlExchange
from pollux.ranks.handover import hand_over
from pollux.ranks.resharding import MovingShards
from pollux.ranks.sharding import under_fully_shard
from pollux.resize.groups import Groups
from pollux.resize.joining import Joiner
from pollux.resize.rehearsal import rehearse
from pollux.resize.requests import ResizeDecision
from pollux.resize.resizer import Resizer
from pollux.training.training import Training


class Regrouping:
    """Moves one rank, its training and its checkpoints from their process groups into the next ones."""

    def __init__(
        self, training: Training, exchange: ControlExchange, checkpointer: Checkpointer, groups: Groups
    ) -> None:
        self._training, self._exchange = training, exchange
        self._checkpointer, self._groups = checkpointer, groups

    def move(self, move: int, resizer: Resizer) -> None:
        """Carry out a move, after the same optimizer step on all ranks. Leaving ranks do not return."""
        training, exchange, checkpointer = self._training, self._exchange, self._checkpointer
        main, rank, size = training.world.rank == 0, training.world.rank, training.world.size
        training.leave_groups()
        checkpointer.leave_group()
        # The checkpoint comes first, as it may take a while: after the decision leaving ranks have seconds to end.
        # If a checkpoint is being written at this moment, it is nearly as new, and a further one would have to wait.
        # If the last checkpoint failed, this one has to be on disk before ranks end. A checkpoint of shards is on disk
        # already, because its ranks could not go on writing it (see `Coordinator`).
        durable = bool(checkpointer.trouble)
        saves = durable or not (checkpointer.writing or checkpointer.sharded)
        durable, saves = exchange.gather((durable, saves))[0]
        seconds = checkpointer.save(exchange, durable=durable) if saves else 0.0
        trouble = checkpointer.trouble if seconds is None and checkpointer.keeps else ""
        decided = resizer.decide(move, seconds, trouble) if main else None
        sent = exchange.gather(None if decided is None else asdict(decided))[0]
        if sent is None:
            return
        decision = ResizeDecision.parse(sent)
        shards = moving_shards(training)
        if shards is not None and len(decision.stay) < size:
            shards.send(size, decision.stay, training.world)
        if rank not in decision.stay:
            self._groups.leave(decision, rank)
        self._enter(decision, decision.stay.index(rank), shards)
        if main:
            ended = size - len(decision.stay)
            planned = f"; {ended} ranks end as planned, though Slurm may call them cancelled" if ended else ""
            choice = in_words(training.choice, decision.size)
            notice(
                f"resized in place from {of_gpus(size)} to {decision.size}: {choice}{planned}",
                event="resized",
                gpus=decision.size,
                step=training.progress.optimizer_steps,
            )
            resizer.resized()

    def join(self, joiner: Joiner, same: Mapping[str, str]) -> None:
        """On a joiner, at its loop: wait for the decision, enter the groups."""
        self._groups.rendezvous = joiner.rendezvous
        rehearse(self._training.models[0].model, joiner.call)
        self._training.synchronize()
        decision = ResizeDecision.parse(joiner.wait(same))
        self._enter(decision, len(decision.stay) + joiner.index)

    def _enter(self, decision: ResizeDecision, rank: int, shards: MovingShards | None = None) -> None:
        """Form the new groups, and hand the state to joiners."""
        training, checkpointer, groups = self._training, self._checkpointer, self._groups
        world = groups.form(training.world, decision, rank)
        checkpointer.change_ranks()
        if decision.joiners:
            state = {"state": checkpointer.state(), "agreed": training.agreed()} if rank == 0 else None
            state = hand_over(state, world, range(len(decision.stay), decision.size))
            if state is not None:
                checkpointer.take_over(state["state"])
                training.agree(state["agreed"])
            shards = shards or moving_shards(training)
            if shards is not None:
                shards.send(len(decision.stay), range(decision.size), world)
        if shards is not None:
            shards.install(world, f"resize{groups.generation}")
        self._exchange.change_group(world.control)
        training.enter_groups(world, decision.choice)


def moving_shards(training: Training) -> MovingShards | None:
    """The model's shards, to be moved; None where every rank holds it whole."""
    first = training.models[0]
    return (
        MovingShards(first.module, first.optimizer, training.script_part)
        if under_fully_shard(first.module)
        else None
    )
