"""Requests to resize, objections to them, and rank 0's decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pollux.errors import PolluxAgentError, RankLost
from pollux.goodput import BatchChoice
from pollux.ranks.world import World
from pollux.scheduler.line import Receipt


@dataclass(frozen=True)
class ResizeRequest:
    """The scheduler's order."""

    number: int
    """The move's id."""
    path: str
    kind: str
    nodes: tuple[str, ...]
    """Of the job after the resize."""
    per_node: int
    begins: bool
    """Whether the scheduler knows of no companion job for the request yet."""
    nonce: str = ""
    """Of a grow: the scheduler accepts a companion job only where the job states this nonce."""

    @classmethod
    def parse(cls, order: Mapping[str, Any]) -> ResizeRequest:
        """From the database's instructions. Raises PolluxAgentError."""
        try:
            request = cls(
                int(order["id"]),
                str(order["path"]),
                str(order["kind"]),
                tuple(map(str, order["nodes"])),
                int(order["gpus_per_node"]),
                order.get("step", "recruiting") == "recruiting",
                str(order.get("nonce", "")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PolluxAgentError(f"not an order that this agent knows: {error!r}") from error
        if request.path != "resize" or request.kind not in ("shrink", "grow"):
            raise PolluxAgentError(f"expected a resize, got {request.path} to {request.kind}")
        return request


_NUMBERS = ("number", "generation", "joiners", "lent", "per_node", "local_batch", "accumulation", "port")


@dataclass(frozen=True)
class ResizeDecision:
    """Rank 0's decision for all ranks, at the agreed step."""

    number: int
    generation: int
    stay: tuple[int, ...]
    """Ranks that stay, by their present numbers, in the order of their new ones."""
    joiners: int
    lent: int
    per_node: int
    local_batch: int
    accumulation: int
    address: str
    port: int
    secret: str

    @classmethod
    def parse(cls, sent: Any) -> ResizeDecision:
        """Return the decision that rank 0 sent. Raises RankLost where it is not one that rank 0 sends."""
        try:
            decision = cls(**{**sent, "stay": tuple(sent["stay"])})
        except (KeyError, TypeError) as error:
            raise RankLost(f"expected rank 0's decision to resize, got {sent!r:.200}: {error}") from error
        numbers = (getattr(decision, name) for name in _NUMBERS)
        whole = all(type(number) is int and number >= 0 for number in (*numbers, *decision.stay))
        texts = type(decision.address) is str and type(decision.secret) is str
        if not (whole and texts and decision.stay):
            raise RankLost(f"expected rank 0's decision to resize, got {sent!r:.200}")
        return decision

    @property
    def size(self) -> int:
        return len(self.stay) + self.joiners

    @property
    def choice(self) -> BatchChoice:
        return BatchChoice(self.local_batch, self.accumulation)

    @property
    def name(self) -> str:
        """A name for the new groups that no earlier groups had."""
        return f"generation/{self.generation}.{self.number}"


@dataclass(frozen=True)
class Answer:
    """Rank 0's acknowledgement to the scheduler of a resize that is done, and the ranks that have to end before it."""

    receipt: Receipt
    nodes: frozenset[str] = frozenset()
    """Nodes of the job's own allocation that leave, by Slurm's names."""
    ranks: int = 0
    """Ranks that end."""
    name: str = ""
    """Of the resize, in the store of the rendezvous."""


def objection(request: ResizeRequest, world: World, *, in_place: bool, resting: bool) -> str | None:
    """Return why the ranks cannot follow the request; None if they can. `resting`: the training makes no more steps."""
    places, wanted = set(world.places), set(request.nodes)
    if not in_place:
        return "this job cannot be resized in place"
    if resting:
        return "the training is over"
    if request.per_node != world.per_node:
        return f"expected {world.per_node} ranks on each node, as now, got {request.per_node}"
    if world.places[0] not in wanted:
        return f"rank 0's node, {world.places[0]}, is to stay"
    if request.kind == "shrink" and not wanted < places:
        return f"expected some of the nodes {', '.join(sorted(places))}, got {', '.join(request.nodes)}"
    if request.kind == "grow" and not places < wanted:
        return f"expected the nodes {', '.join(sorted(places))} and more, got {', '.join(request.nodes)}"
    return None
