"""Compare how long background and synchronous checkpoints block a step.

Both save the same state: of a plain training, and of one under `fully_shard` on two ranks that write their shards.
Pairs are interleaved in one process, so that other work on the machine weighs on both. Run it on its own:
`pytest tests/benchmarks/test_checkpoint_blocking.py -s`.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pollux.checkpoint.writer import CheckpointWriter

PAIRS = 7
GOAL = 0.10


def test_a_step_waits_for_under_a_tenth_of_a_synchronous_save(tmp_path: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024, device=device)).sum().backward()
    optimizer.step()

    writer = CheckpointWriter(model, tmp_path, 1)
    pairs = _pairs(writer, {"model": model, "optimizer": optimizer}, 0, lambda: None)
    blocked, whole = zip(*pairs, strict=True)
    ratios = [a / b for a, b in pairs]
    size = sum(p.numel() * p.element_size() * 3 for p in model.parameters())
    print(
        f"\n{device}, {size / 1e6:.0f} MB: blocked {statistics.median(blocked) * 1e3:.1f} ms of "
        f"{statistics.median(whole) * 1e3:.0f} ms ({statistics.median(ratios):.1%})"
    )
    assert statistics.median(ratios) < GOAL


def _pairs(writer: CheckpointWriter, parts: dict[str, Any], rank: int, together: Any) -> list[list[float]]:
    """Measure (seconds blocked, seconds of a synchronous save), alternately."""
    writer.prepare(parts, rank=rank)
    writer.settle()
    pairs = []
    for step in range(PAIRS):
        spent = []
        for durable in (False, True):
            together()
            begun = time.perf_counter()
            writer.save(parts, dict, {"optimizer_steps": 2 * step + durable}, rank=rank, durable=durable)
            spent.append(time.perf_counter() - begun)
            writer.settle()
        pairs.append(spent)
    return pairs


def _sharded_rank(rank: int, folder: Path, pipe: Any) -> None:
    """Run one of two ranks.

    It sends (seconds blocked, seconds of a synchronous save) of each pair.
    """
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    writer = CheckpointWriter(model, folder / "checkpoints", 2)
    pairs = _pairs(writer, {"model": model, "optimizer": optimizer}, rank, dist.barrier)
    pipe.send(pairs)
    dist.barrier()
    os._exit(0)


def test_nor_does_a_sharded_trainings_step(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    running = []
    for rank in range(2):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_sharded_rank, args=(rank, tmp_path, there))
        process.start()
        there.close()
        running.append((process, here))
    pairs = [pair for _, pipe in running for pair in pipe.recv()]
    for process, _ in running:
        process.join(30)
        process.kill()
    blocked, whole = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"\nfully_shard, 2 ranks: blocked {blocked * 1e3:.1f} ms of {whole * 1e3:.0f} ms ({ratio:.1%})")
    assert ratio < GOAL
