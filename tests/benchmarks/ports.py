"""Ten trainings in the shape of public scripts: plain against port, on 1, 2 and 3 ranks, and after a kill.

    python -m tests.benchmarks.ports [--only NAME ...] [--markdown FILE]

Each port runs at a fixed batch of 12 on 1, 2 and 3 ranks. Then all its ranks are killed (SIGKILL) in mid-training, and
it goes on at another number of ranks: 1 to 2, 2 to 3, 3 to 1. Its weights or metrics must be those of the plain script,
rounding aside. The exit status is 1 where they are not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.mistakes import Rank, run
from tests.benchmarks.mistakes_scripts import Slip
from tests.benchmarks.ports_trainings import M0, PORTS, Port

SIZES = (1, 2, 3)
MOVES = ((1, 2), (2, 3), (3, 1))
AT_EACH_STEP = {"POLLUX_CHECKPOINT_INTERVAL": "0"}
BOUND = 100.0
"""Of a difference that is none: a port that came to no end."""


def trained(port: Port, folder: Path, number: int, ranks: int) -> list[Rank]:
    """Run one attempt; 0 is killed."""
    return run(Slip("", port.port, ranks, environment=AT_EACH_STEP), folder, number)[0]


def difference(found: list[Rank], wanted: list[float]) -> float:
    """Return the largest difference of any rank's numbers from the plain script's."""
    most = 0.0
    for rank in found:
        if rank.weights is None or len(rank.weights) != len(wanted):
            print(rank.error, rank.said[-3:], file=sys.stderr)
            return BOUND
        most = max(most, *(abs(a - b) for a, b in zip(rank.weights, wanted, strict=True)))
    return most


def measure(port: Port) -> tuple[list[float], list[tuple[float, int]]]:
    """Return the differences on each number of ranks, and after each kill, with the step that the restart began at."""
    wanted, sizes, moves = port.plain(), [], []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            sizes.append(difference(trained(port, Path(folder), 1, size), wanted))
    for first, then in MOVES:
        with tempfile.TemporaryDirectory() as folder:
            killed = trained(port, Path(folder), 0, first)
            assert all(rank.weights is None for rank in killed), "the first attempt was to be killed"
            found = trained(port, Path(folder), 1, then)
            moves.append((difference(found, wanted), int(found[0].facts.get("began", 0))))
    return sizes, moves


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare ten ports with their plain scripts.")
    parser.add_argument("--only", nargs="*", default=[], help="names of trainings")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    options = parser.parse_args()
    lines, bad = [], []
    for port in PORTS:
        if options.only and port.name not in options.only:
            continue
        sizes, moves = measure(port)
        good = max(sizes + [found for found, _ in moves]) <= port.tolerance and all(step for _, step in moves)
        if not good:
            bad.append(port.name)
        cells = [f"{found:.0e}" for found in sizes] + [f"{found:.0e} (step {step})" for found, step in moves]
        lines.append(f"| {port.name} | {port.compares} | {' | '.join(cells)} | {port.tolerance:.0e} |")
        print("ok  " if good else "BAD ", lines[-1], flush=True)
    if options.markdown is not None:
        options.markdown.write_text(PAGE.format(m0=M0, rows="\n".join(lines)))
    print(f"{len(lines)} trainings, {len(bad)} unlike the plain script: {', '.join(bad)}")
    return 1 if bad else 0


PAGE = """# Ports of public scripts

`make bench-ports` trains ten small trainings in the shape of public scripts (`ports_trainings.py`): plain torch on one
process, and the port at the same batch of {m0} on 1, 2 and 3 ranks over gloo. Then SIGKILL ends all ranks in
mid-training, and the port goes on at another number of ranks, from the checkpoint of the step in brackets. The cells
are the largest difference of any rank's numbers from the plain script's. The last column is the difference that is
allowed: rounding, which grows over the steps.

| training | compared | 1 rank | 2 ranks | 3 ranks | killed on 1, on 2 again | 2, 3 | 3, 1 | allowed |
|---|---|---|---|---|---|---|---|---|
{rows}
"""


if __name__ == "__main__":
    sys.exit(main())
