"""Lead a rank from its process groups into the next ones."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import NoReturn

from pollux.errors import LEFT_STATUS
from pollux.ranks.rendezvous import Rendezvous, leave_groups, tell_environment, until
from pollux.ranks.torch_internals import abort_nccl
from pollux.ranks.world import World, backend_of_default_group
from pollux.resize.requests import ResizeDecision
from pollux.slurm_job.environment import LENT_RANKS

logger = logging.getLogger("pollux")

LEAVE_WAIT = 5.0
"""Seconds that a leaving rank waits until the other ranks have left the old groups."""


class Groups:
    """Leads this rank from its present process groups into the next ones."""

    def __init__(self) -> None:
        self.generation = 0
        """Resizes of these processes so far."""
        self.rendezvous: Rendezvous | None = None
        """Where the ranks meet; None before the first resize."""

    def open(self) -> Rendezvous:
        """On rank 0: the store of the rendezvous. Raises RankLost where it cannot be opened."""
        if self.rendezvous is None:
            self.rendezvous = Rendezvous.open()
        return self.rendezvous

    def _join(self, decision: ResizeDecision) -> Rendezvous:
        """The store of the rendezvous, on any rank. Raises RankLost."""
        if self.rendezvous is None:
            self.rendezvous = Rendezvous.join(decision.address, decision.port, decision.secret)
        return self.rendezvous

    def leave(self, decision: ResizeDecision, rank: int) -> NoReturn:
        """End this rank. The script may still destroy its groups itself."""
        rendezvous = self._join(decision)
        # If this rank ended now, ranks that are still in the old groups would see a failure.
        until(lambda: rendezvous.count(f"{decision.name}/free") >= len(decision.stay), LEAVE_WAIT)
        # The other ranks have ended theirs, or `LEAVE_WAIT` is over. `destroy_process_group` alone would wait for them.
        abort_nccl()
        rendezvous.count(f"{decision.name}/left", 1)
        logger.info("rank %d leaves in move %d", rank, decision.number)
        raise SystemExit(LEFT_STATUS)

    def form(
        self,
        old: World,
        decision: ResizeDecision,
        rank: int,
        environ: MutableMapping[str, str] = os.environ,
    ) -> World:
        """Leave the present groups; form the decision's, as `rank`. Raises RankLost where other ranks do not come."""
        rendezvous = self._join(decision)
        # A companion's node may fail, or Slurm may end its job: the job's own ranks then start again.
        own = rank < decision.size - decision.lent
        environ[LENT_RANKS] = str(decision.lent if own else 0)
        # `fully_shard` needs a group before `attach`: the script's own, of backends of its choice.
        backend = None if old.own else backend_of_default_group()
        leave_groups()
        rendezvous.count(f"{decision.name}/free", 1)
        world = rendezvous.form(
            old,
            decision.name,
            rank,
            decision.size,
            per_node=decision.per_node,
            lent=decision.lent,
            backend=backend,
        )
        self.generation = decision.generation
        tell_environment(world, environ)
        return world
