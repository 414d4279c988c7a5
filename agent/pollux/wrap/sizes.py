"""What a wrapped trainer has shown at each size, over all attempts of its job: a file beside its checkpoints."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pollux.fit import fit
from pollux.goodput import ThroughputParams
from pollux.private_folder import PrivateFolder, read_private, write_durably

log = logging.getLogger("pollux")

UNKNOWN_BATCH = 5040
"""Examples of a step whose batch size nobody gave: it divides by most numbers of GPUs."""
_GUESSED = 0.01
"""Weight of a guessed row against a measured one."""
_DIVIDES = 0.9
"""Share of a step that is taken to divide over twice the GPUs until it was measured."""


def of_training(folder: Path, checkpoints: str, attempt: int) -> tuple[Path, Sizes]:
    """Return the file of a trainer, and what it says.

    The pattern of its checkpoints tells it from others of the same job. Those of one pattern are told apart by their
    order: one that has ended in this attempt is not the one that begins.
    """
    digest = hashlib.sha256(os.path.abspath(checkpoints).encode()).hexdigest()[:12]
    for number in itertools.count(1):
        file = folder / f"wrap-{digest}-{number}.json"
        if (sizes := Sizes.read(file)).ended != attempt:
            break
    return file, sizes


@dataclass(slots=True)
class Sizes:
    """Step times by (nodes, GPUs, examples of a step), and the sizes at which the trainer did not start."""

    rows: dict[tuple[int, int, int], float] = field(default_factory=dict)
    """Seconds of a step."""
    bad: dict[int, str] = field(default_factory=dict)
    """By GPUs: the trainer's last line there."""
    fruitless: int = 0
    """Starts in a row that made no step."""
    every: float | None = None
    """Steps from one checkpoint to the next."""
    step: float = 0.0
    """Steps up to the newest checkpoint, from which a start goes on."""
    line: str = ""
    """The pattern that named it: another one may count in another unit."""
    start: float = 0.0
    """The longest time from a launch to its first step [s]."""
    deaf: bool = False
    """A signal has brought no checkpoint."""
    ended: int = -1
    """The attempt in which its training came to its end; -1: none."""

    @classmethod
    def read(cls, file: Path) -> Sizes:
        """Read what earlier attempts have left; nothing where that is no such file."""
        try:
            found = json.loads(read_private(file))
            rows = {(int(n), int(k), int(m)): float(seconds) for n, k, m, seconds in found["rows"]}
            bad = {int(gpus): str(line) for gpus, line in found["bad"].items()}
            counts = [found[name] or 0 for name in ("fruitless", "step", "start", "every")]
            sound = all(1 <= n <= k and m >= 1 and seconds > 0 for (n, k, m), seconds in rows.items())
            if not (sound and all(0 <= count < math.inf for count in (*counts, *rows.values()))):
                raise ValueError("expected nodes, GPUs, examples, and finite counts and times")
            return cls(**found | {"rows": rows, "bad": bad})
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            log.warning("%s says nothing (%s): sizes are measured again", file, error)
            return cls()

    def write(self, file: Path) -> None:
        """Keep this for later attempts. Raises OSError."""
        found = asdict(self) | {"rows": [[*size, seconds] for size, seconds in self.rows.items()]}
        data = json.dumps(found).encode()
        with PrivateFolder.make(file.parent):
            write_durably(file, lambda opened: opened.write(data))

    def most_allowed(self) -> int | None:
        """Return the most GPUs at which the trainer starts; None: it failed at no larger number than it has trained on.

        Where it trained on no size yet, fewer GPUs than failed may do.
        """
        good = self.good
        least = min(good, default=0)
        failed = [gpus for gpus in self.bad if gpus > least]
        if not failed:
            return None
        return max((gpus for gpus in good if gpus < max(failed)), default=max(1, min(failed) - 1))

    def least_allowed(self) -> int:
        """Return the fewest GPUs at which the trainer starts: the fewest on which it has trained, if fewer failed."""
        least = min(self.good, default=1)
        return least if min(self.bad, default=least) < least else 1

    @property
    def good(self) -> list[int]:
        """The numbers of GPUs on which it has trained."""
        return sorted({gpus for _, gpus, _ in list(self.rows)})

    def barred(self) -> str:
        """Say why sizes are left out by `most_allowed` or `least_allowed`; empty where none are."""
        most, least = self.most_allowed(), self.least_allowed()
        out = sorted(gpus for gpus in self.bad if most is not None and gpus > most)
        out += [gpus for gpus in self.bad if gpus < least]
        return f"its trainer did not start on {out[0]} GPUs ({self.bad[out[0]]})" if out else ""

    def fitted(self) -> ThroughputParams | None:
        """Return the throughput model; None before a measurement."""
        rows = list(self._weighted())
        if not rows:
            return None
        nodes, gpus, locals_, seconds, weights = zip(*rows, strict=True)
        return fit(nodes, gpus, locals_, [math.nan] * len(rows), seconds, weights=weights)

    def _weighted(self) -> Iterator[tuple[int, int, float, float, float]]:
        """Yield nodes, GPUs, examples per GPU, seconds and weight of each row.

        One size alone, or two on either side of a node's border, do not tell what part of a step divides over more
        GPUs: without two guessed rows the fit would take all of it for a constant.
        """
        rows = dict(self.rows)  # another thread adds to it
        for (nodes, gpus, batch), seconds in rows.items():
            yield nodes, gpus, batch / gpus, seconds, 1.0
        many = {nodes > 1 for nodes, _, _ in rows}
        known = len({(nodes, gpus) for nodes, gpus, _ in rows})
        if known == 1 or (known == 2 and len(many) == 2):
            (nodes, gpus, batch), seconds = min(rows.items(), key=lambda row: row[0][1])
            for times in (2, 4):
                each = batch / (gpus * times)
                yield nodes, gpus * times, each, seconds * (1.0 - _DIVIDES + _DIVIDES / times), _GUESSED
