"""Go on without ranks that were lost, in the processes that remain.

When a rank is killed (with its process, its node or its companion job), its connections close, and the next collective
of the other ranks fails. They then abort their groups, and write the number of their last completed step into the
launcher's store. The lowest remaining rank decides. It knows which ranks are lost, because every rank holds a
connection to that store. The remaining ranks form new groups, take over the state of the rank with the most completed
steps, and repeat the current step from its first sample. If rank 0 is lost, the lowest remaining rank becomes rank 0.

In these cases all ranks start again from the newest checkpoint instead:

- all ranks on the job's own nodes are lost, or node 0 with its launcher, which keeps the store;
- a rank ends by itself: its script has failed, or made fewer passes;
- a rank is lost while groups are formed;
- something in the processes keeps the number of ranks (`obstacle_to_fewer_ranks`);
- NCCL reduces the gradients: optimizer steps are queued on the GPU behind the reduction that fails, and change the
  weights before the host knows.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pollux.checkpoint.checkpointer import Checkpointer
from pollux.errors import LEFT_STATUS, PolluxAgentError, RankLost
from pollux.launcher.rank_channel import LauncherLine
from pollux.loop.notices import notice
from pollux.ranks.connections import close_groups, keep_groups, tell_peers
from pollux.ranks.control import ControlExchange
from pollux.ranks.handover import hand_over
from pollux.ranks.rendezvous import leave_groups, until
from pollux.ranks.sharding import under_fully_shard
from pollux.resize.capability import obstacle_to_fewer_ranks
from pollux.resize.groups import Groups
from pollux.resize.requests import ResizeDecision
from pollux.training.training import Training

logger = logging.getLogger("pollux")

LOOK = 0.1
"""Seconds between two checks that the deciding rank still lives."""

COME_WAIT = 60.0
"""Seconds, in addition to two steps, in which every remaining rank has to notice the loss."""

LEAD_WAIT = 300.0
"""Seconds for which a rank waits for a lower one that is there and does not decide. Rank 0 may be in an evaluation. One
that hangs decides nothing."""


class Mender:
    """One rank's part in going on without lost ranks."""

    def __init__(
        self,
        training: Training,
        exchange: ControlExchange,
        checkpointer: Checkpointer,
        groups: Groups,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._training, self._exchange = training, exchange
        self._checkpointer, self._groups = checkpointer, groups
        self._launched = bool(environ.get("POLLUX_LAUNCHED_AT"))
        """Whether the launcher lets the other ranks live when a rank is killed: `pollux run` does, others end them."""
        self._present = ""
        """This rank's key among those present; empty while a loss cannot be mended."""
        self.mended_at: float | None = None
        """When the newest loss was mended; POSIX seconds."""

    # -- before -----------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """Open the store where ranks meet after a loss; every rank calls it."""
        world, groups = self._training.world, self._groups
        if not (self._launched and world.device.type == "cpu" and world.distributed):
            return
        able = obstacle_to_fewer_ranks(self._training) is None
        way: tuple[str, int, str] | None = None
        if world.rank == 0 and able:
            try:
                rendezvous = groups.open()
                way = rendezvous.address, rendezvous.port, rendezvous.secret
            except PolluxAgentError as error:
                logger.warning("a lost rank will end this job: %s", error)
        # Every rank exchanges its obstacles: a script may create one on a single rank.
        found = self._exchange.gather((way, able))
        told = found[0][0]
        if told is not None and all(each for _, each in found):
            groups.meet(str(told[0]), int(told[1]), str(told[2]))
            self.hold()

    def hold(self) -> None:
        """Be present among the ranks of the present groups."""
        rendezvous, world = self._groups.rendezvous, self._training.world
        if rendezvous is None or not self._launched or world.device.type != "cpu":
            return
        if under_fully_shard(self._training.models[0].module):
            return  # a lost rank's shards are lost
        self._present = self._key("present", world.rank)
        rendezvous.hold(self._present)
        atexit.unregister(self.leave)
        atexit.register(self.leave)
        line = LauncherLine.from_environment() if world.rank == 0 else None
        if line is not None:
            line.can_mend(True)

    def leave(self) -> None:
        """Note that this rank ends by itself: the others must not go on."""
        if self._present and self._groups.rendezvous is not None:
            with contextlib.suppress(RankLost):
                self._groups.rendezvous.tell(self._key("ended", self._training.world.rank), True)
            line = LauncherLine.from_environment() if self._training.world.rank == 0 else None
            if line is not None:
                line.can_mend(False)
        self._present = ""

    def _key(self, name: str, rank: int) -> str:
        return f"{name}/{self._groups.generation}/{rank}"

    # -- after a collective has failed ------------------------------------------------------------------------

    def mend(self, where: str = "") -> bool:
        """Go on without the lost ranks; return False if that is impossible.

        Every remaining rank calls it, at the point where it noticed the loss. Raises RankLost if another rank is lost
        during the call, and SystemExit on a rank that has to leave. `where`: the collective of a library that this rank
        will repeat. All ranks have to be in the same collective: a rank that has finished it would not repeat it.
        """
        if not self._present or self._groups.rendezvous is None:
            return False
        begun, world, rendezvous = time.monotonic(), self._training.world, self._groups.rendezvous
        self._present = ""
        tell_peers()  # they may still wait in a collective
        steps, local_rank = self._training.progress.optimizer_steps, os.environ.get("LOCAL_RANK", "0")
        rendezvous.tell(self._key("came", world.rank), [steps, int(local_rank), where])
        go = self._key("go", 0)
        self._await_lower(go)
        told = rendezvous.heard(go)
        if told is None:
            # A lower rank that was waited for in vain may decide at the same time.
            told = rendezvous.tell_first(go, self._decided() or {})
        close_groups()
        keep_groups()
        leave_groups()
        if not told:
            return False
        decision = ResizeDecision.parse(told["decision"])
        if world.rank not in decision.stay:
            raise SystemExit(LEFT_STATUS)
        self._form(decision, int(told["source"]), [int(rank) for rank in told["behind"]])
        if self._training.world.rank == 0:
            line = LauncherLine.from_environment()
            if line is not None:
                line.mended(self._training.world.places, told["without"], lent=bool(decision.lent))
            self.mended_at = time.time()
            notice(
                f"{world.size - decision.size} of {world.size} ranks were lost: the training goes on with "
                f"{decision.size}, after {time.monotonic() - begun:.1f} s"
            )
        return True

    def _await_lower(self, go: str) -> None:
        """Wait until the ranks have been told to go on, or no lower one decides."""
        rendezvous = self._groups.rendezvous
        assert rendezvous is not None
        for lower in range(self._training.world.rank):
            present, end = self._key("present", lower), time.monotonic() + LEAD_WAIT
            while rendezvous.heard(present) is not None and rendezvous.heard(go) is None:
                if time.monotonic() >= end:
                    logger.warning("rank %d is there and does not come", lower)
                    break
                time.sleep(LOOK)

    def _decided(self) -> dict[str, Any] | None:
        """On the lowest rank: the ranks that go on; None if one ended by itself."""
        rendezvous, world = self._groups.rendezvous, self._training.world
        assert rendezvous is not None
        open_: set[int] = set(range(world.size))
        came: dict[int, int] = {}
        local_ranks: dict[int, int] = {}
        places: set[str] = set()

        def heard_of_all() -> bool:
            for rank in sorted(open_):
                word = rendezvous.heard(self._key("came", rank))
                if word is not None:
                    came[rank], local_ranks[rank] = int(word[0]), int(word[1])
                    places.add(str(word[2]))
                elif rendezvous.heard(self._key("present", rank)) is not None:
                    continue
                open_.discard(rank)
            return not open_

        if not until(heard_of_all, COME_WAIT + 2.0 * self._training.step.seconds):
            logger.warning("ranks that do not come: %s", ", ".join(map(str, sorted(open_))))
        lost = set(range(world.size)) - set(came)
        ended = [rank for rank in lost if rendezvous.heard(self._key("ended", rank)) is not None]
        if ended or not lost:
            return None
        if len(places) > 1:
            logger.warning(
                "ranks are in different collectives of a library: they cannot go on without the lost ones"
            )
            return None
        stay = tuple(sorted(came))
        if world.nodes > 1:
            # The same number of ranks on each node.
            whole = Counter(world.places[rank] for rank in came)
            stay = tuple(rank for rank in stay if whole[world.places[rank]] == world.per_node)
        if not any(rank < world.size - world.lent for rank in stay):
            return None  # none of the job's own ranks
        per_node = world.per_node if world.nodes > 1 else len(stay)
        choice = self._training.choice_on(max(len(stay) // per_node, 1), len(stay))
        decision = ResizeDecision(
            0,
            self._groups.generation + 1,
            stay,
            0,
            sum(rank >= world.size - world.lent for rank in stay),
            per_node,
            choice.local_batch,
            choice.accumulation,
            *(rendezvous.address, rendezvous.port, rendezvous.secret),
        )
        here = {local_ranks[rank] for rank in stay if world.places[rank] == world.places[stay[0]]}
        furthest = max(came[rank] for rank in stay)
        return {
            "decision": asdict(decision),
            "source": next(new for new, rank in enumerate(stay) if came[rank] == furthest),
            "without": sorted(set(range(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))) - here),
            "behind": [new for new, rank in enumerate(stay) if came[rank] < furthest],
        }

    def _form(self, decision: ResizeDecision, source: int, behind: list[int]) -> None:
        """Form the new groups; take over the state of the furthest rank."""
        training, checkpointer = self._training, self._checkpointer
        training.data.rewind()
        rank = decision.stay.index(training.world.rank)
        world = self._groups.form(training.world, decision, rank)
        others = [other for other in range(world.size) if other != source]
        if others:
            # Rank 0's last decision may have reached only some ranks.
            told = hand_over(
                training.agreed() if rank == source else None, world, source=source, receivers=others
            )
            if told is not None:
                training.agree(told)
        if behind:
            # Some ranks have completed the step in which another was lost.
            state = hand_over(
                checkpointer.state() if rank == source else None, world, source=source, receivers=behind
            )
            if state is not None:
                checkpointer.take_over(state)
        self._exchange.change_group(world.control)
        training.settle(world, decision.choice)
        self.hold()
