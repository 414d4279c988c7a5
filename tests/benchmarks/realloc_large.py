"""Measure resizes in place of a training with a large state on many ranks.

    python -m tests.benchmarks.realloc_large [--mb 256] [--ranks 8] [--moves 10] [--kinds DDP FSDP2] [--json FILE]
        [--markdown FILE]

One training over gloo on this machine, half of its ranks from a companion job: it grows to all ranks and shrinks to its
own, again and again, as polluxd would order it. No Slurm takes part. Half of the state is parameters, half momentum.
Under DDP each rank has all of it, under FSDP2 a shard.

The pause is the longest time, in any process that lives through the move, from the end of the last step before it to
the beginning of the first one after it. The step after it may be longer than others: DDP makes its buckets again.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from contrib.commit import COMMIT
from tests.benchmarks.endings import Nodes, wait
from tests.benchmarks.results import save

STEPS_BETWEEN = 3
PATIENCE = 240.0
KINDS = ("DDP", "FSDP2")
MARK = "\n## A large state on many ranks\n"


def train(folder: Path, mb: int, kind: str) -> None:
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import pollux.loop.job
    from pollux.loop.coordinator import Coordinator
    from pollux.resize import resizer
    from pollux.resize.resizer import ResizePhase

    resizer.resizes_in_place = pollux.loop.job.may_grow = lambda *_: True  # type: ignore[attr-defined]
    after_step = Coordinator.after_step
    moves, quiet = 0, 0

    def stepped(self: Coordinator) -> None:
        """Have rank 0 order the next move, as polluxd would."""
        nonlocal moves, quiet
        after_step(self)
        world = self.training.world
        idle = self.resizer.phase is ResizePhase.IDLE
        quiet = quiet + 1 if idle else 0
        if world.rank == 0 and quiet > STEPS_BETWEEN:
            moves, quiet = moves + 1, 0
            kind, nodes = ("shrink", ["n0"]) if world.lent else ("grow", ["n0", "c0"])
            order = {"id": moves, "path": "resize", "kind": kind, "nodes": nodes, "nonce": "5eed"}
            self.order_resize(order | {"gpus_per_node": world.per_node})

    Coordinator.after_step = stepped  # type: ignore[method-assign]
    torch.manual_seed(0)
    net = nn.Linear(1024, mb * (1 << 20) // 2 // 4 // 1024, bias=False)
    if kind == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        torch.distributed.init_process_group()
        fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)
    job = pollux.attach(net, optimizer, adaptive=False)
    loader = job.loader(TensorDataset(torch.randn(4096, 1024)), 64)
    with (folder / f"{os.getpid()}.txt").open("w", buffering=1) as file:
        for _ in job.epochs(1000):
            for (x,) in loader:
                print("begin", time.time(), job.world.size, file=file)
                job.step(lambda x=x: job.model(x).pow(2).mean())  # type: ignore[misc]
                print("end", time.time(), job.world.size, file=file)


def read(
    folder: Path,
) -> tuple[dict[tuple[int, int], list[float]], dict[tuple[int, int], list[float]], list[float]]:
    """Pauses and first steps by (ranks before, after), and all other steps."""
    pauses: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    firsts: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    steps: list[float] = []
    for path in folder.glob("*.txt"):
        lines = [line.split() for line in path.read_text().split("\n")[:-1]]
        records = [(kind, float(at), int(size)) for kind, at, size in lines]
        moves = 0
        for (_, earlier, before), (kind, later, after) in pairwise(records):
            if kind == "begin" and before != after:
                moves += 1
                key = before, after
                pauses[key][moves] = max(pauses[key].get(moves, 0.0), later - earlier)
                begun = True
            elif kind == "end":
                taken = later - earlier
                if moves and begun:
                    firsts[key][moves] = max(firsts[key].get(moves, 0.0), taken)
                else:
                    steps.append(taken)
                begun = False
    listed = [{key: list(found.values()) for key, found in each.items()} for each in (pauses, firsts)]
    return listed[0], listed[1], steps


def companions(run: Nodes, folder: Path, moves: int) -> None:
    """Start the companion job of each move that grows, up to the last."""
    for number in range(1, moves + 1, 2):
        file = folder / f"checkpoints/companion-{number}.json"
        wait(lambda file=file: file.exists() or run.process.poll() is not None, folder)  # type: ignore[misc]
        run.companion(file).wait(PATIENCE)


def page(row: dict[str, Any]) -> str:
    kinds = row["kinds"]
    lines = [
        f"A state of {row['state_mb']} MB, {row['ranks']} gloo ranks on one machine, half of them from a companion",
        "job; no Slurm (`tests/benchmarks/realloc_large.py`). The pause is the time without a step. Under DDP a rank",
        "that comes receives the whole state. Under FSDP2 each rank sends the rows that others are to hold; the ranks",
        "write a checkpoint before, while the training goes on. A step",
        f"moves the whole gradient between all ranks on {os.cpu_count()} cores: "
        + ", ".join(f"{found['step_s']:.2f} s under {kind}" for kind, found in kinds.items())
        + ", median.",
        "",
        "| in place | moves | pause, median [s] | longest [s] | first step after, median [s] |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for kind, measured in kinds.items():
        for name, found in measured["moves"].items():
            lines.append(
                f"| {kind}, {name} ranks | {found['moves']} | {found['pause_s']:.2f} | "
                f"{found['longest_s']:.2f} | {found['first_step_s']:.2f} |"
            )
    measured = [
        f"{kind} at commit {found['commit']}, load {found['load']:.1f} at the start"
        for kind, found in kinds.items()
    ]
    return "\n".join(["", *lines, "", f"Measured: {'; '.join(measured)}.", ""])


def measure(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Resize one training again and again."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="realloc-") as name:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(
            f"import sys\nfrom pathlib import Path\nfrom tests.benchmarks.realloc_large import train\n"
            f"train(Path({name!r}), {arguments.mb}, {kind!r})\n"
        )
        run = Nodes("", folder, 1, nproc=arguments.ranks // 2, script=str(script))
        try:
            companions(run, folder, arguments.moves)
            time.sleep(1.0)
        finally:
            run.process.kill()
            run.process.wait()
        pauses, firsts, steps = read(folder)
        if not pauses:
            raise SystemExit((folder / "out").read_text()[-3000:])
    moves = {
        f"{before} to {after}": {
            "moves": len(found),
            "pause_s": median(found),
            "longest_s": max(found),
            "first_step_s": median(firsts[before, after]) if firsts.get((before, after)) else None,
        }
        for (before, after), found in sorted(pauses.items())
    }
    return {"step_s": median(steps), "commit": COMMIT, "load": load, "moves": moves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--moves", type=int, default=10, help="an even number")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", type=Path, default=Path("bench-out/realloc_large.json"))
    parser.add_argument("--markdown", type=Path, help="a page whose section on this is replaced")
    arguments = parser.parse_args()
    row = {
        "state_mb": arguments.mb,
        "ranks": arguments.ranks,
        "kinds": {kind: measure(kind, arguments) for kind in arguments.kinds},
    }
    print(json.dumps(row, indent=2))
    save(arguments.json, row)
    if arguments.markdown:
        before = arguments.markdown.read_text().partition(MARK)[0]
        arguments.markdown.write_text(before + MARK + page(row))


if __name__ == "__main__":
    main()
