"""Ranks are killed under `pollux run`: new ones go on from the nodes' memory.

Each training is compared with a plain run that was resumed from a checkpoint's file at the same step.
"""

from __future__ import annotations

import json
import random
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agent.conftest import run_ranks
from tests.unit.agent.launched_step import PRELUDE, STOPPED, Step, step

SCRIPT = """
import random, threading, torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset
import pollux
from pollux.ranks.node_memory import node_memory

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(101, 6)
data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(101))
parts = torch.nn.Linear(6, 4), torch.nn.LayerNorm(4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1)
network = torch.nn.Sequential(*parts)
if SHARDED:
    from torch.distributed.fsdp import fully_shard
    torch.distributed.init_process_group("gloo")
    fully_shard(network)
optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
job = pollux.attach(network, optimizer, adaptive=False, checkpoint_dir=here / CHECKPOINTS)
loader = job.loader(data, 8)
note("begun", step=job.progress.optimizer_steps, start=start)
lives, memory = not (start == 0 and rank == LOST), node_memory()
for epoch in job.epochs(3):
    for inputs, targets, ids in loader:
        if job.progress.optimizer_steps == STOP:
            break
        time.sleep(0.02)
        if not lives and (memory.shared.copied or memory.shared.saved):
            threading.Timer(AFTER, kill, [os.getppid() if NODE else os.getpid()]).start()
            lives = True
        at, mine = job.progress.optimizer_steps, []
        if loader.data.local_samples:
            mine = [f"{loader.data.pass_index}.{i}" for i in ids.tolist()]
        with job.micro_batch():
            job.backward(mse_loss(job.model(inputs), targets))
        if job.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()
            note("used", step=at, samples=mine, start=start)
    if job.progress.optimizer_steps == STOP:
        break
weights = [p.full_tensor() if SHARDED else p for p in network.state_dict().values()]
job.close()
note("over", weights=[p.detach().double().tolist() for p in weights], size=job.world.size)
"""


def script(
    folder: str | None,
    *,
    lost: int = -1,
    after: float = 0.0,
    node: bool = False,
    stop: int = -1,
    sharded: bool = False,
) -> str:
    values = {"LOST": lost, "AFTER": after, "NODE": node, "STOP": stop, "SHARDED": sharded}
    values["CHECKPOINTS"] = folder or "none"
    body = SCRIPT
    for name, value in values.items():
        body = body.replace(name, repr(value))
    return body if folder else body.replace(", checkpoint_dir=here / 'none'", "")


def execute(script: Path) -> None:
    sys.argv = [str(script), str(script.parent)]
    runpy.run_path(str(script), run_name="__main__")


def resumed(folder: Path, at: int, before: int, after: int, *, sharded: bool = False) -> Any:
    """The weights of a plain training that stops at step `at` on so many ranks, and resumes on others."""
    for size, stop in ((before, at), (after, -1)):
        (folder / str(stop)).mkdir(parents=True)
        (folder / str(stop) / "own").symlink_to(folder / "checkpoints", target_is_directory=True)
        (folder / "checkpoints").mkdir(mode=0o700, exist_ok=True)
        path = folder / str(stop) / "train.py"
        path.write_text(PRELUDE + script("own", stop=stop, sharded=sharded))
        run_ranks(size, execute, path, env={"SLURMD_NODENAME": "n0"})
    notes = [json.loads(line) for line in (folder / "-1/log").read_text().splitlines()]
    return next(note["weights"] for note in notes if note["kind"] == "over")


def each_once(launched: Step) -> None:
    """Every sample counts once per pass, by the newest start that took its step."""
    newest: dict[int, int] = {}
    for note in launched.log("used"):
        newest[note["step"]] = max(newest.get(note["step"], 0), note["start"])
    taken = [n for n in launched.log("used") if n["start"] == newest[n["step"]]]
    counts = Counter(sample for note in taken for sample in note["samples"])
    assert set(counts.values()) == {1}
    assert len(counts) == 3 * 101


@pytest.mark.parametrize(("seed", "checkpoints"), [(2, "own"), (3, None), (4, "sharded")])
def test_killed_at_a_random_moment_the_training_goes_on_as_one_restored_from_that_step(
    seed: int, checkpoints: str | None, tmp_path: Path
) -> None:
    drawn = random.Random(seed)
    sharded = checkpoints == "sharded"
    nodes, workers = (2, 1) if seed == 2 else (1, 2 if sharded else 3)
    lost = drawn.randrange(nodes * workers)
    body = script(checkpoints, lost=lost, after=drawn.uniform(0.0, 0.4), sharded=sharded)
    with step(tmp_path, nodes, body, workers=workers, POLLUX_EXCHANGE_INTERVAL="0.1") as launched:
        assert launched.statuses() == [0] * nodes, launched.output()
    size = nodes * workers
    begun = [note["step"] for note in launched.log("begun") if note["start"] == 1]
    assert len(begun) == size, launched.output()
    (at,) = set(begun)
    before = [note["step"] for note in launched.log("used") if note["start"] == 0]
    assert 0 < at <= max(before) + 1, "restored from memory"
    each_once(launched)
    over = launched.log("over")
    assert [note["size"] for note in over] == [size] * size
    assert over[0]["weights"] == resumed(tmp_path / "plain", at, size, size, sharded=sharded)
    assert "restored the copy in memory" in launched.output()


def test_after_a_lost_node_the_others_go_on_with_the_ranks_that_are_left(tmp_path: Path) -> None:
    body = script("own", lost=2, after=random.Random(7).uniform(0.0, 0.4), node=True)
    with step(tmp_path, 3, body, workers=1, POLLUX_EXCHANGE_INTERVAL="0.1") as launched:
        assert launched.statuses() == [0, 0, STOPPED], launched.output()
    (at,) = {note["step"] for note in launched.log("begun") if note["start"] == 1}
    assert at > 0
    each_once(launched)
    over = launched.log("over")
    assert [note["size"] for note in over] == [2, 2]
    assert over[0]["weights"] == resumed(tmp_path / "plain", at, 3, 2)
    assert "on 2 node(s)" in launched.output()


def test_a_state_that_is_too_large_for_memory_is_restored_from_its_file(tmp_path: Path) -> None:
    body = script("own", lost=1, after=0.1)
    with step(
        tmp_path,
        1,
        body,
        POLLUX_EXCHANGE_INTERVAL="0.05",
        POLLUX_CHECKPOINT_INTERVAL="0.2",
        POLLUX_MEMORY_SHARE="1e-9",
    ) as launched:
        assert launched.statuses() == [0], launched.output()
    assert "no copies of the state in memory" in launched.output()
    assert f"restored the checkpoint in {tmp_path}/own" in launched.output()
    each_once(launched)


HOPELESS = """
import torch
import pollux

network = torch.nn.Linear(2, 1)
job = pollux.attach(network, torch.optim.SGD(network.parameters(), lr=0.1), adaptive=False)
loader = job.loader(torch.randn(64, 2), 8)
for epoch in job.epochs(1, statistical=True):
    for inputs in loader:
        if rank == 1:
            kill(os.getpid())
        job.step(lambda: job.model(inputs).mean())
"""


def test_a_rank_that_is_lost_before_every_step_ends_the_job(tmp_path: Path) -> None:
    with step(tmp_path, 1, HOPELESS) as launched:
        assert launched.statuses() == [137], launched.output()
    assert max(note["start"] for note in launched.log("started")) == 3, "no step was made in between"
