"""Read the ledgers of a training and reconstruct its lineage.

The lineage says which samples are part of the training's last state, and which processes made that state.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

SAMPLES = 1438
"""How many digits the training uses (contrib/examples/emulated.py)."""


@dataclass(frozen=True)
class Done:
    """A completed optimizer step."""

    step: int
    at: float
    """POSIX time [s]."""
    ranks: int


@dataclass
class Ledger:
    """One rank's file, written by counted.py."""

    launch: int
    """Equal for all ranks of one start, and greater for a later one."""
    joined: bool
    """Whether the rank joined a running training from a companion job."""
    start: int
    """The optimizer step that the rank began with."""
    pid: int
    batches: list[tuple[int, list[int]]] = field(default_factory=list)
    """(step, samples) of each micro-batch."""
    done: list[Done] = field(default_factory=list)
    again: set[int] = field(default_factory=set)
    """Steps that were taken again, as another rank was lost in them; `batches` has their last form."""

    def sizes(self) -> list[int]:
        """Return the successive numbers of ranks that this process trained with."""
        seen = [done.ranks for done in self.done]
        return [n for i, n in enumerate(seen) if i == 0 or seen[i - 1] != n]


@dataclass(frozen=True)
class Lineage:
    """The part of a training that its last state contains."""

    launches: int
    undone: int
    """Samples whose training was undone: after a crash the job went back to an earlier checkpoint."""
    repeated: int
    """Completed optimizer steps that a later start repeated: none where every move was acknowledged."""
    counts: Counter[int]

    def faults(self, passes: int) -> list[str]:
        """List deviations from the rule: each sample once per pass, and no other."""
        if not self.launches:
            return ["it never trained"]
        odd = {i: n for i in range(SAMPLES) if (n := self.counts[i]) != passes}
        foreign = sorted(set(self.counts) - set(range(SAMPLES)))
        told = (
            [f"{len(odd)} samples not seen {passes} times, such as {dict(list(odd.items())[:3])}"]
            if odd
            else []
        )
        return told + ([f"samples that do not exist: {foreign[:3]}"] if foreign else [])


def ledgers(folder: Path) -> list[Ledger]:
    """Read a job's ledgers, the oldest start first.

    A rank that was killed before its first step has no ledger.
    """
    found = []
    for path in sorted(folder.glob("*.txt")):
        lines = path.read_text().split("\n")[:-1]  # the last one is empty, or was cut off by a kill
        if lines:
            found.append(_read(int(path.name.split("-")[0]), lines))
    return sorted(found, key=lambda ledger: ledger.launch)


def _read(launch: int, lines: Sequence[str]) -> Ledger:
    began, start, _, _, _, pid = lines[0].split()
    ledger = Ledger(launch, began == "joined", int(start), int(pid))
    for line in lines[1:]:
        first, *rest = line.split()
        if first == "again":
            ledger.again.add(int(rest[0]))
            ledger.batches = [batch for batch in ledger.batches if batch[0] != int(rest[0])]
        elif first == "done":
            ledger.done.append(Done(int(rest[0]), float(rest[1]), int(rest[2])))
        else:
            ledger.batches.append((int(first), [int(index) for index in rest]))
    return ledger


def lineage(found: Sequence[Ledger]) -> Lineage:
    """Return what the last state of a training contains, from its `ledgers`.

    A step counts unless a later start began at it or before it. A rank that joined belongs to the newest start at the
    time when it joined.
    """
    starts: dict[int, list[Ledger]] = {}
    newest = 0
    for ledger in found:
        newest = newest if ledger.joined else ledger.launch
        starts.setdefault(newest, []).append(ledger)
    counts, undone, repeated, bound = Counter[int](), 0, 0, sys.maxsize
    for launch in sorted(starts, reverse=True):
        again = set().union(*(ledger.again for ledger in starts[launch]))
        for ledger in starts[launch]:
            lost = again - ledger.again
            for step, indices in ledger.batches:
                if step in lost:
                    continue  # this rank was lost in it
                if step < bound:
                    counts.update(indices)
                else:
                    undone += len(indices)
        over = {done.step for ledger in starts[launch] for done in ledger.done}
        repeated += sum(step >= bound for step in over)
        bound = min([bound, *(ledger.start for ledger in starts[launch] if not ledger.joined)])
    return Lineage(len(starts), undone, repeated, counts)
