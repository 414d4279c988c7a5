"""Make every ordinary slip in a training script, and record how it ends.

    python -m tests.benchmarks.mistakes [--only SLIP ...] [--json FILE]

Each slip is a small real training, on one rank or on several over gloo, in one attempt or two. It ends in one of three
ways: `right` (the weights are those of the script without the slip, or what its row in `SLIPS` says), `message` (the
agent said something beyond its usual lines), or `refused` (an error of the agent ends the training). A slip that ends
in none of them is `silent`, or `hangs`; the exit status is then 1. The slips are those of
`mistakes_scripts.py`, `mistakes_state.py` and `mistakes_units.py`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from contrib.devcluster.processes import free_ports
from tests.benchmarks.mistakes_scripts import SLIPS, Attempt, Slip
from tests.benchmarks.mistakes_state import STATE_SLIPS
from tests.benchmarks.mistakes_units import UNIT_SLIPS
from tests.benchmarks.results import save

LIMIT_S = 90.0
"""After which an attempt hangs."""

GRACE_S = 15.0
"""For the other ranks to end after one has failed; a launcher then ends them."""

USUAL = re.compile(r"batch size \d+ on|restored the checkpoint|(already )?finished: \d+ optimizer steps")
"""Lines that every training has."""
OF_RESTARTS = re.compile(
    r"an optimizer step now has \d+ passes|goes on at sample|goes on with the training in .*begun otherwise"
)
"""Lines that every slip of two attempts has."""


@dataclass
class Row:
    """One line of mistakes.json."""

    slip: str
    ranks: int
    outcome: str
    message: str


@dataclass
class Rank:
    """What one rank of an attempt left."""

    said: list[str]
    error: str
    refused: bool
    weights: list[float] | None
    facts: dict[str, Any]


def rank_body(slip: Slip, attempt: Attempt, log_of_attempt: Path) -> None:
    """Run the script on one rank; append what it says to its log."""

    def note(**entry: Any) -> None:
        with log_of_attempt.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(said=record.getMessage())

    logging.getLogger("pollux").addHandler(Said())
    logging.getLogger("pollux").setLevel(logging.INFO)
    warnings.simplefilter("always")
    # torch's own warnings are no answer to the slip.
    warnings.showwarning = lambda message, *_: (
        note(said=str(message)) if re.search(r"job\.|micro_batch", str(message)) else None
    )
    torch.set_num_threads(1)
    try:
        weights, facts = slip.script(attempt)
        note(weights=weights, facts=facts)
    except BaseException as error:
        text = str(error).splitlines()[0] if str(error) else ""
        note(error=f"{type(error).__name__}: {text}", refused=type(error).__module__ == "pollux.errors")
        raise


def run(slip: Slip, folder: Path, number: int) -> tuple[list[Rank], bool]:
    """Run one attempt; return its ranks, and whether it hung."""
    port = str(free_ports(1)[0])
    pids: dict[int, int] = {}
    for rank in range(slip.ranks):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                quiet = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(quiet, 1)
                os.dup2(quiet, 2)
                os.environ.update(
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    WORLD_SIZE=str(slip.ranks),
                    LOCAL_WORLD_SIZE=str(slip.ranks),
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=port,
                    GLOO_SOCKET_IFNAME="lo",
                    **{"POLLUX_EXCHANGE_INTERVAL": "0", "POLLUX_PATIENCE": "5", **slip.environment},
                )
                rank_body(
                    slip, Attempt(number, rank, folder / "checkpoints"), folder / f"log-{number}-{rank}"
                )
                status = 0
            finally:
                os._exit(status)
        pids[pid] = rank
    begun, failed, hung = time.monotonic(), None, False
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            del pids[pid]
            failed = failed or (time.monotonic() if status else None)
        late = time.monotonic() - begun > LIMIT_S
        if late or (failed is not None and time.monotonic() - failed > GRACE_S):
            hung = late and failed is None
            for left in pids:
                os.kill(left, signal.SIGKILL)
                os.waitpid(left, 0)
            pids.clear()
        time.sleep(0.01)
    return [found(folder / f"log-{number}-{rank}") for rank in range(slip.ranks)], hung


def found(log: Path) -> Rank:
    """Read what one rank has noted."""
    rank = Rank([], "", False, None, {})
    for line in log.read_text().splitlines() if log.exists() else ():
        entry = json.loads(line)
        if "said" in entry:
            rank.said.append(entry["said"])
        rank.error, rank.refused = entry.get("error", rank.error), entry.get("refused", rank.refused)
        rank.weights, rank.facts = entry.get("weights", rank.weights), entry.get("facts", rank.facts)
    return rank


def outcome(slip: Slip, ranks: list[Rank], hung: bool, wanted: list[Rank] | None) -> tuple[str, str]:
    """Say how a slip ended, and in which words."""
    refused = next(
        (rank.error for rank in ranks if rank.refused and not rank.error.startswith("RankLost")), ""
    )
    if refused:
        return "refused", refused
    usual = [] if slip.usual else [USUAL, *([OF_RESTARTS] if slip.attempts > 1 else [])]
    said = [line for rank in ranks for line in rank.said if not any(each.search(line) for each in usual)]
    if hung:
        return "hangs", "; ".join(said)
    if slip.good is not None and all(rank.facts and slip.good(rank.facts) for rank in ranks):
        return "right", ""
    if wanted is not None and all(map(alike, ranks, wanted)):
        return "right", ""
    if said:
        return "message", said[-1]
    return "silent", next((rank.error for rank in ranks if rank.error), "")


def alike(rank: Rank, other: Rank) -> bool:
    """Whether two trainings have the same weights, rounding aside."""
    if rank.weights is None or other.weights is None:
        return False
    return torch.allclose(torch.tensor(rank.weights), torch.tensor(other.weights), rtol=1e-4, atol=1e-6)


def attempts(slip: Slip) -> tuple[list[Rank], bool]:
    """Run all attempts; return what the last one left."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(slip.attempts - 1):
            run(slip, Path(folder), number)
        return run(slip, Path(folder), slip.attempts - 1)


def measure(slip: Slip, references: dict[Any, list[Rank]]) -> Row:
    """Make a slip, and what it is compared with."""
    wanted = None
    if slip.like is not None:
        key = slip.like, slip.ranks
        if key not in references:
            references[key] = attempts(Slip("", slip.like, slip.ranks, attempts=slip.attempts))[0]
        wanted = references[key]
    return Row(slip.name, slip.ranks, *outcome(slip, *attempts(slip), wanted))


def main() -> int:
    parser = argparse.ArgumentParser(description="Make every ordinary slip, and record how it ends.")
    parser.add_argument("--only", nargs="*", default=[], help="names of slips")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    references: dict[Any, list[Rank]] = {}
    rows = []
    for slip in (*SLIPS, *STATE_SLIPS, *UNIT_SLIPS):
        if options.only and slip.name not in options.only:
            continue
        row = measure(slip, references)
        rows.append(row)
        print(f"{row.outcome:8} {row.ranks} {row.slip:48} {row.message[:110]}", flush=True)
        if options.json is not None:
            save(options.json, [asdict(each) for each in rows])
    bad = [row.slip for row in rows if row.outcome not in ("right", "message", "refused")]
    print(
        f"{len(rows)} slips, {len(bad)} silent or hanging: {', '.join(bad)}"
        if bad
        else f"{len(rows)} slips, none silent"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
