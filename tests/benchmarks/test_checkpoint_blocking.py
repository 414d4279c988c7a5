"""How long a step waits for a checkpoint saved in the background, against a synchronous save of the same state.

Pairs are interleaved in one process, so that whatever else the machine does weighs on both. Run on its own:
`pytest tests/benchmarks/test_checkpoint_blocking.py -s`.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from pollux.checkpoint import CheckpointStore
from pollux.checkpoint_background import BackgroundSaver

PAIRS = 7
GOAL = 0.10


def test_a_step_waits_for_under_a_tenth_of_a_synchronous_save(tmp_path: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024, device=device)).sum().backward()
    optimizer.step()

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    store = CheckpointStore(tmp_path)
    saver = BackgroundSaver(store)
    saver.prepare(state())
    saver.wait()
    ratios, blocked, whole = [], [], []
    for _ in range(PAIRS):
        begun = time.perf_counter()
        saver.save(state(), meta={})
        blocked.append(time.perf_counter() - begun)
        saver.wait()
        whole.append(store.save(state(), meta={}).seconds)
        ratios.append(blocked[-1] / whole[-1])
    size = sum(p.numel() * p.element_size() * 3 for p in model.parameters())
    print(
        f"\n{device}, {size / 1e6:.0f} MB: blocked {statistics.median(blocked) * 1e3:.1f} ms of "
        f"{statistics.median(whole) * 1e3:.0f} ms ({statistics.median(ratios):.1%})"
    )
    assert statistics.median(ratios) < GOAL
