"""What refusals bar to each job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from polluxd.apply.headroom import Headroom
from polluxd.apply.startable import Eligibility, forbids
from polluxd.model import Move

Bar = tuple[tuple[int, str] | None, Eligibility | None]
"""Most GPUs of a job and the rule, and where it may start; None: anything.

With no node left, the GPUs are those at which it is tried again.
"""


@dataclass(frozen=True, slots=True)
class Bars:
    """What refusals bar."""

    most: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    """Most GPUs of a job, and the rule."""
    nodes: Mapping[int, int] = field(default_factory=dict)
    """Most nodes of a job."""
    eligibility: Mapping[int, Eligibility] = field(default_factory=dict)

    def lowered(self, allowed: Headroom) -> Headroom:
        """Return the headroom within these bars, too."""
        most = dict(allowed.most)
        for job_id, bound in self.most.items():
            most[job_id] = min(bound, most.get(job_id, bound), key=lambda one: one[0])
        return replace(allowed, most=most) if self.most else allowed

    def within(self, allowed: Headroom) -> Bars:
        """Return these bars with what the headroom bars besides."""
        return replace(self, most=self.lowered(allowed).most)

    def forbids(self, move: Move) -> str:
        """Return why the move is barred, which may be known only since it was planned; else an empty text."""
        if rule := forbids(self.eligibility.get(move.job_id), move):
            return rule
        gpus, rule = self.most.get(move.job_id, (inf, ""))
        if move.target.gpus > max(gpus, move.source.gpus):
            return f"{rule} allows no more than {gpus} GPUs"
        nodes = self.nodes.get(move.job_id, inf)
        return "its script runs on no further node" if len(move.target.nodes) > nodes else ""
