"""Checkpoints of fully_shard trainings.

They move from any number of ranks to any other. One intact checkpoint exists at every instant.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from pollux import attach
from pollux.checkpoint.checkpoint_store import CheckpointStore
from pollux.checkpoint.writer import CheckpointWriter
from pollux.errors import CheckpointError, ForeignCheckpoint

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="fully_shard is supported from torch 2.13 on"
)

EXAMPLES = 96
EPOCHS = 4


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(EXAMPLES, 7, generator=generator)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(EXAMPLES, 1, generator=generator)
    return TensorDataset(x, y, torch.arange(EXAMPLES))


class Network(torch.nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(7, width)
        self.second = torch.nn.Linear(width, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


def sharded(width: int = 5) -> Network:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = Network(width)
    fully_shard(model.first)
    fully_shard(model)
    return model


def train(directory: str, steps: int, shard: bool = True) -> tuple[int, list[int], list[torch.Tensor], float]:
    """Train `steps` more optimizer steps from the checkpoint, then leave as a drained job does."""
    model = sharded() if shard else Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    job = attach(model, optimizer, adaptive=False, checkpoint_dir=directory)
    loader = job.loader(data(), 16, per_gpu=(1, 16))
    used: list[int] = []
    last = job.progress.optimizer_steps + steps
    for _ in job.epochs(EPOCHS, statistical=True):
        for x, y, ids in loader:
            if job.progress.optimizer_steps == last:
                break
            used += ids.tolist() if loader.data.local_samples else []
            with job.micro_batch():
                job.backward(mse_loss(job.model(x), y))
            if job.sync_gradients:
                model.seen += 1
                optimizer.step()
                optimizer.zero_grad()
        if job.progress.optimizer_steps == last:
            save(job, durable=True)
            break
    weights = [whole(p) for p in model.parameters()]
    reached = job.progress.optimizer_steps
    job.close()
    return reached, used, weights, float(model.seen)


def save(job: Any, *, durable: bool) -> None:
    job.coordinator.save(durable=durable)


def whole(tensor: Any) -> torch.Tensor:
    with torch.no_grad():
        full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return full.detach().clone()


@pytest.mark.slow
def test_a_training_moves_between_numbers_of_ranks(ranks: Any, tmp_path: Path) -> None:
    """4 -> 2 -> 1 -> 8 ranks end with the weights of an undisturbed run. No example is lost or repeated."""
    plain = ranks(2, train, str(tmp_path / "plain"), 1000, False)[0]
    used: Counter[int] = Counter()
    reached = 0
    for size, steps in ((4, 5), (2, 4), (1, 8), (8, 1000)):
        results = ranks(size, train, str(tmp_path / "moved"), steps)
        assert results[0][0] == (reached + steps if steps < 1000 else plain[0])
        reached = results[0][0]
        for result in results:
            used.update(result[1])
            assert all(torch.equal(a, b) for a, b in zip(result[2], results[0][2], strict=True))
            assert result[3] == reached, "the buffer went on where it was"
    assert set(used.values()) == {EPOCHS}
    assert len(used) == EXAMPLES
    for a, b in zip(plain[2], results[0][2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert len(CheckpointStore(tmp_path / "moved").paths()) == 2


def spoil(directory: str) -> list[Any]:
    """Return, on each rank, the step that training resumed from after several kinds of damage, or the refusal."""
    path = Path(directory)
    train(directory, 2)
    train(directory, 2)
    store = CheckpointStore(path)
    seen: list[Any] = []
    rank = dist.get_rank()
    newest = store.paths()[-1]
    dist.barrier()
    if rank == 0:
        victim = max(newest.glob("*.distcp"), key=lambda file: file.stat().st_size)
        raw = bytearray(victim.read_bytes())
        raw[len(raw) // 2] ^= 1
        victim.write_bytes(raw)
    dist.barrier()
    seen.append(train(directory, 0)[0])
    for body in (
        lambda: attach(other := sharded(9), torch.optim.SGD(other.parameters(), lr=0.1), checkpoint_dir=path),
        lambda: train(directory, 1, shard=False),
    ):
        try:
            body()
        except ForeignCheckpoint as error:
            seen.append(str(error))
    dist.barrier()
    if rank == 1:
        for checkpoint in store.paths():
            (checkpoint / "state.pt").unlink()
    dist.barrier()
    try:
        train(directory, 1)
    except CheckpointError as error:
        seen.append(str(error))
    return seen


def test_damaged_and_foreign_checkpoints(ranks: Any, tmp_path: Path) -> None:
    for step, foreign, other_kind, none_left in ranks(2, spoil, str(tmp_path)):
        assert step == 2, "the damaged newest gives way to the one before"
        assert "another training" in foreign
        assert "fully_shard" in other_kind
        assert "move them away" in none_left


def periodic(directory: str) -> tuple[list[int | None], list[float], int]:
    """Background saves hold the state of their call; failures are reported."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    job = attach(model, optimizer, adaptive=False, checkpoint_dir=directory)
    saved: list[int | None] = []
    loader = job.loader(data(), 16)
    writer: Any = job.coordinator.checkpointer.writer
    weights: list[float] = []
    for x, y, _ in loader:
        job.backward(mse_loss(job.model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if len(weights) < 2:
            writer.wait()
            if len(weights) == 1 and dist.get_rank() == 1:
                FileSystemWriter.write_data = full  # type: ignore[method-assign]  # one rank's disk
            save(job, durable=False)
            weights.append(float(whole(next(model.parameters())).sum()))
        else:
            break
    writer.wait()
    saved.append(job.coordinator.checkpointer.saved)
    job.close()
    again = sharded()
    resumed = attach(again, torch.optim.AdamW(again.parameters()), checkpoint_dir=directory)
    weights.append(float(whole(next(again.parameters())).sum()))
    resumed.close()
    return saved, weights, len(CheckpointStore(directory).paths())


def drained(directory: str) -> tuple[int, int | None, bool]:
    """Return (optimizer step, step of the checkpoint, whether the order was followed) of a drain in mid-training."""
    os.environ["POLLUX_EXCHANGE_INTERVAL"] = "0"
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    job = attach(model, optimizer, adaptive=False, checkpoint_dir=directory)
    job.coordinator.drains.wait_for_end = lambda: None  # type: ignore[method-assign]
    saved: int | None = None
    for n, (x, y, _) in enumerate(job.loader(data(), 8)):
        if n == 3 and job.is_main:
            job.coordinator.drains.order(7)
        if saved is None and 7 in job.coordinator.drains.followed:
            saved = job.coordinator.checkpointer.saved
            break
        job.step(lambda x=x, y=y: mse_loss(job.model(x), y))
    result = job.progress.optimizer_steps, saved, 7 in job.coordinator.drains.followed
    job.close()
    return result


def test_a_drain_writes_all_shards_at_the_same_step(ranks: Any, tmp_path: Path) -> None:
    results = ranks(2, drained, str(tmp_path))
    assert results[0] == results[1]
    step, saved, followed = results[0]
    assert followed
    assert step == saved
    assert 3 < step < 12
    assert len(CheckpointStore(tmp_path).paths()) == 1, "closing found the step kept already"


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_saves_beside_the_training(ranks: Any, tmp_path: Path) -> None:
    for saved, (first, second, resumed), count in ranks(2, periodic, str(tmp_path)):
        assert saved == [1], "the step in hand counts"
        assert count == 1, "the save that one rank could not make is none"
        assert resumed == first != second


def in_the_background(directory: str) -> list[float]:
    """Save twice beside a training that goes on; return what each save holds."""
    dist.init_process_group("gloo")
    model = torch.nn.Linear(3, 1, bias=False)
    fully_shard(model)
    weight: Any = model.weight
    writer = CheckpointWriter(model, Path(directory), 1)
    parts = {"model": model}
    writer.prepare(parts, rank=0)
    held = []
    for step in (1, 2):
        with torch.no_grad():
            weight.to_local().fill_(step)
        writer.save(parts, dict, {"optimizer_steps": step}, rank=0, durable=False)
        with torch.no_grad():
            weight.to_local().fill_(-1.0)
        writer.wait()
        assert (writer.saved, writer.trouble) == (step, "")
    for path in writer.store.paths():
        writer.store.read_shards(path, {"model.weight": weight.detach()})
        held.append(float(weight.to_local().mean()))
    return held


def test_a_save_beside_the_training_holds_the_weights_of_its_call(ranks: Any, tmp_path: Path) -> None:
    """Its copies lie in the memory of the copies before."""
    assert ranks(1, in_the_background, str(tmp_path)) == [[1.0, 2.0]]
