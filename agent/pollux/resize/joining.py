"""Let a rank of a companion job (a joiner) enter a running training.

A joiner runs the user's script like any other rank, in a separate process group until its loop begins. There it waits
until the job's ranks form groups with it. It gets the whole state from rank 0, and begins in the middle of a pass, as a
restart would.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pollux.errors import LEFT_STATUS, LaunchError, RankLost
from pollux.launcher.companion_file import CompanionFile, CompanionFileGone, read_companion_file
from pollux.ranks.rendezvous import Rendezvous, alone, leave_groups
from pollux.ranks.world import World, is_own

logger = logging.getLogger("pollux")

STOP = "stop"
"""In place of a call or of a decision: rank 0 does not need the joiners any more."""


class Joiner:
    """This rank on its way into a job."""

    def __init__(self, file: CompanionFile, environ: MutableMapping[str, str] = os.environ) -> None:
        """Raises LaunchError where the file says nothing to ranks."""
        self._file, content = file, file.document
        try:
            per_node = int(content["per_node"])
            node, local = int(environ.get("GROUP_RANK") or 0), int(environ.get("LOCAL_RANK") or 0)
            self.index = node * per_node + local
            """This rank's place among the joiners."""
            self.size, self._nodes = int(content["size"]), int(content["nodes"])
            self.rank = int(content["first"]) + self.index
            """The rank that it will be."""
            self.move = int(content["move"])
            self.grows = bool(content["grows"])
            """The job began on one rank."""
            self.call = content["call"]
            """Shapes of the arguments of rank 0's newest pass; see `rehearsal`."""
            environ["POLLUX_ADAPTIVE"] = "yes" if content["adaptive"] else "no"
        except (KeyError, TypeError, ValueError) as error:
            raise LaunchError(f"the companion's file is not one that rank 0 writes: {error!r}") from error
        if int(environ.get("LOCAL_WORLD_SIZE") or 1) != per_node:
            raise LaunchError(
                f"expected {per_node} ranks on each node of the companion, got {environ.get('LOCAL_WORLD_SIZE')}"
            )
        self._rendezvous: Rendezvous | None = None

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] = os.environ) -> Joiner | None:
        """Read the file that POLLUX_COMPANION names; None in a job of its own. Raises LaunchError."""
        name = environ.get("POLLUX_COMPANION")
        if not name:
            return None
        try:
            return cls(read_companion_file(Path(name)), environ)
        except CompanionFileGone:
            # The launcher has read it: rank 0 gave the move up since then.
            logger.info("rank 0 does not need this rank any more")
            raise SystemExit(LEFT_STATUS) from None

    def world(self, device: torch.device) -> World:
        """The world that this rank will be in. Until then it has a process group of its own. Raises RankLost."""
        self._rendezvous = Rendezvous.join(self._file.address, self._file.port, self._file.secret)
        atexit.register(self._failed)
        if is_own():
            leave_groups()  # another library formed it
        own = not dist.is_initialized()  # fully_shard needs a group before `attach`
        if own:
            alone(device)
        return World(self.rank, self.size, self._nodes, device, None, own=own, waiting=True)

    @property
    def rendezvous(self) -> Rendezvous:
        assert self._rendezvous is not None
        return self._rendezvous

    def wait(self, same: Mapping[str, str]) -> dict[str, Any]:
        """At the loop: report ready, with the `same` facts; wait for the decision.

        Ends the process if rank 0 no longer needs it. Raises RankLost if rank 0 is lost.
        """
        rendezvous = self.rendezvous
        rendezvous.tell(self.key(f"ready/{self.index}"), dict(same))
        if rendezvous.awaited(self.key("call")) != STOP:
            rendezvous.count(self.key("here"), 1)
        decision = rendezvous.awaited(self.key("go"))
        atexit.unregister(self._failed)
        if decision == STOP:
            logger.info("rank 0 does not need this rank any more")
            raise SystemExit(LEFT_STATUS)
        return dict(decision)

    def key(self, name: str) -> str:
        return f"recruit/{self.move}/{name}"

    def _failed(self) -> None:
        """Tell rank 0 not to wait: the script ends before its loop has begun."""
        try:
            self.rendezvous.tell(
                self.key("failed"), f"see joiner {self.index}'s part of the companion's output"
            )
        except RankLost as error:
            logger.warning("%s", error)
