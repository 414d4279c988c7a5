"""The training loop on real ranks: gradients, agreement, resumption."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from pollux import Job, attach, stepping
from pollux.errors import BatchError, CheckpointError, PolluxAgentError
from pollux.tuning import BatchChoice

EXAMPLES = 203  # prime to every batch size here: passes end in uneven tails


def data(length: int = EXAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(length, 6, generator=generator)
    y = x @ torch.randn(6, 1, generator=generator) + 0.3 * torch.randn(length, 1, generator=generator)
    return TensorDataset(x, y, torch.arange(length))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def train_step(job: Job, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    with job.micro_batch():
        loss = mse_loss(job.model(x), y)
        job.backward(loss)
    if job.sync_gradients:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


# -- gradients ------------------------------------------------------------------------------------------------


def gradients_with_pollux(per_gpu: tuple[int, int]) -> list[Tensor]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = attach(model, optimizer, adaptive=False, sampling=2)
    loader = job.loader(data(), 24, per_gpu=per_gpu, shuffle=False)
    seen = []
    for _ in job.epochs(1, passes=True):
        for x, y, _ids in loader:
            with job.micro_batch():
                job.backward(mse_loss(job.model(x), y))
            if job.sync_gradients:
                seen.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))
                optimizer.step()
                optimizer.zero_grad()
    job.close()
    return seen


def gradients_with_ddp(rank: int, size: int, m: int, passes: int) -> list[Tensor]:
    """Plain DistributedDataParallel, on the same examples in the same order, whole batches only."""
    model: nn.Module = network()
    if size > 1:
        torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y, _ = data().tensors
    seen = []
    for start in range(0, EXAMPLES - size * m * passes + 1, size * m * passes):
        for k in range(passes):
            first = start + k * size * m + rank * m
            rows = slice(first, first + m)
            if isinstance(model, DistributedDataParallel) and k < passes - 1:
                with model.no_sync():
                    (mse_loss(model(x[rows]), y[rows]) * (1 / passes)).backward()
            else:
                (mse_loss(model(x[rows]), y[rows]) * (1 / passes)).backward()
        seen.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def both(m: int, passes: int) -> tuple[list[Tensor], list[Tensor]]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plain = gradients_with_ddp(rank, size, m, passes)
    return plain, gradients_with_pollux((1, m))


@pytest.mark.parametrize(("size", "m", "passes"), [(3, 8, 1), (2, 4, 3)])
def test_gradients_are_bit_for_bit_those_of_plain_ddp(ranks: Any, size: int, m: int, passes: int) -> None:
    for plain, ours in ranks(size, both, m, passes):
        assert len(ours) == 9  # 8 whole steps of 24, and a tail of 11
        for a, b in zip(plain, ours, strict=False):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("m", "passes"), [(24, 1), (8, 3)])
def test_gradients_on_one_rank_are_those_of_plain_accumulation(m: int, passes: int) -> None:
    plain, ours = gradients_with_ddp(0, 1, m, passes), gradients_with_pollux((m, m))
    for a, b in zip(plain, ours, strict=False):
        assert torch.equal(a, b)


def full_batch_gradient(rows: slice) -> Tensor:
    model = network()
    x, y, _ = data().tensors
    mse_loss(model(x[rows]), y[rows]).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def first_gradient(length: int, m0: int, per_gpu: tuple[int, int]) -> Tensor:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = attach(model, optimizer, adaptive=False)
    loader = job.loader(data(EXAMPLES), m0, per_gpu=per_gpu, shuffle=False)
    loader.data.load_state_dict({**loader.data.state_dict(), "position": EXAMPLES - length})
    for x, y, _ids in loader:
        with job.micro_batch():
            job.backward(mse_loss(job.model(x), y))
        if job.sync_gradients:
            return torch.cat([p.grad.flatten() for p in model.parameters()])
    raise AssertionError("no step")


@pytest.mark.parametrize("length", [1, 2, 10, 17])
def test_a_short_step_at_the_end_weighs_every_example_alike(ranks: Any, length: int) -> None:
    expected = full_batch_gradient(slice(EXAMPLES - length, EXAMPLES))
    for found in ranks(3, first_gradient, length, 36, (1, 4)):
        torch.testing.assert_close(found, expected)


# -- progress and learning rate -------------------------------------------------------------------------------


def test_a_run_at_its_own_batch_size_is_plain_training() -> None:
    def run(plain: bool) -> list[Tensor]:
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler = LambdaLR(optimizer, lambda n: 0.98**n)
        job = attach(model, optimizer, scheduler, adaptive=False)
        loader = job.loader(data(), 16)
        if plain:
            loader_again: Any = list(loader.data)
            loader_again += list(loader.data)
            for x, y, _ids in loader_again:
                mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        else:
            for _ in job.epochs(2):
                for x, y, _ids in loader:
                    train_step(job, optimizer, x, y)
                    if job.sync_gradients:
                        scheduler.step()
            assert job.progress.samples == 2 * EXAMPLES
            assert job.progress.steps == 2 * EXAMPLES / 16
        job.close()
        return [p.detach().clone() for p in model.parameters()]

    for a, b in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_loop_without_micro_batch_works() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job = attach(model, optimizer, adaptive=False)
    loader = job.loader(data(), 16)
    seen: list[int] = []
    for _ in job.epochs(1):
        for x, y, ids in loader:
            mse_loss(job.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += ids.tolist()
    assert sorted(seen) == list(range(EXAMPLES))
    job.close()


def test_leaving_an_epoch_early_keeps_the_place() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job = attach(model, optimizer, adaptive=True)
    loader = job.loader(data(), 16, max_batch_size=16)
    seen: list[int] = []
    for _ in job.epochs(3):
        for n, (x, y, ids) in enumerate(loader):
            # Measured steps are cut in two: some breaks come half-way through one.
            train_step(job, optimizer, x, y)
            seen += ids.tolist()
            if n == 4:
                break
    assert len(set(seen)) == len(seen) >= 3 * 5 * 8
    assert len(seen) - 8 <= job.progress.samples <= len(seen)
    job.close()


def test_bad_batch_sizes_are_named() -> None:
    model = network()
    job = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(BatchError, match="below the initial one"):
        job.loader(data(), 64, max_batch_size=32)
    with pytest.raises(BatchError, match="from 1, got 0"):
        job.loader(data(), 64, max_batch_size=0)
    with pytest.raises(PolluxAgentError, match="before the loop"):
        next(job.epochs(1))
    job.close()


def test_a_step_that_amp_skips_earns_nothing_and_uses_its_batch() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    job = attach(model, optimizer, scaler=scaler, adaptive=False, sampling=1)
    loader = job.loader(data(), 28)
    seen: list[int] = []
    steps = 0
    for n, (x, y, ids) in enumerate(loader):
        with job.micro_batch():
            job.backward(mse_loss(job.model(x), y) * (float("inf") if n == 2 else 1.0))
        if job.sync_gradients:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            steps += 1
        seen += ids.tolist()
        if steps == 7:
            break
    assert len(set(seen)) == len(seen) == 7 * 28
    assert job.progress.optimizer_steps == 6
    assert job.progress.samples == 6 * 28
    assert job._averages.skipped <= 1
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    job.close()


# -- agreement ------------------------------------------------------------------------------------------------


def follow(changes: dict[int, tuple[int, int]]) -> list[tuple[int, int, int, float, list[int]]]:
    """Train two passes while rank 0 proposes batch sizes at given steps; what this rank did at each step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = attach(model, optimizer, adaptive=True, sampling=1)
    loader = job.loader(data(), 12, max_batch_size=60, per_gpu=(1, 12))
    if job.stepper.advisor is not None:
        job.stepper.advisor.close()  # the proposals below are all that there are
    stepping.EXCHANGE_INTERVAL = 0.0
    log: list[tuple[int, int, int, float, list[int]]] = []
    ids: list[int] = []
    for _ in job.epochs(2, passes=True):
        for x, y, batch_ids in loader:
            with job.micro_batch():
                job.backward(mse_loss(job.model(x), y))
            ids += batch_ids.tolist() if loader.data.local_samples else []
            if job.sync_gradients:
                log.append(
                    (
                        job.progress.optimizer_steps,
                        job.local_batch,
                        job.accumulation,
                        sum(job.lr_factors),
                        ids,
                    )
                )
                ids = []
                optimizer.step()
                optimizer.zero_grad()
            change = changes.get(job.progress.optimizer_steps)
            if job.stepper.advisor is not None and change is not None:
                job.stepper.advisor.proposal = BatchChoice(*change)
    job.close()
    torch.distributed.barrier()
    return log


def test_a_batch_change_is_agreed_on_all_ranks(ranks: Any) -> None:
    logs = ranks(3, follow, {9: (9, 1), 11: (4, 2), 13: (5, 0)})
    decisions = [[entry[:4] for entry in log] for log in logs]
    assert decisions[0] == decisions[1] == decisions[2]
    sizes = [entry[1:3] for entry in decisions[0]]
    assert sizes[0] == (4, 0)
    for change in [(9, 1), (4, 2), (5, 0)]:
        assert change in sizes
    # The larger batch is taken at a higher learning rate, once a noise scale is known.
    assert any(entry[3] > 1.0 for entry in decisions[0])
    counts = torch.zeros(EXAMPLES)
    for log in logs:
        for entry in log:
            counts += torch.bincount(torch.tensor(entry[4], dtype=torch.int64), minlength=EXAMPLES)
    assert counts.eq(2).all(), "two passes show every example twice"


def stop(directory: str, after: float) -> tuple[int, int, list[int]]:
    """Train until asked to drain, then leave at the checkpoint; (step, world size, examples used)."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = LambdaLR(optimizer, lambda n: 0.999**n)
    job = attach(model, optimizer, scheduler, adaptive=False, checkpoint_dir=directory)
    loader = job.loader(data(), 24, per_gpu=(1, 24))
    if job.is_main and after >= 0:
        threading.Thread(target=lambda: (time.sleep(after), job._restart.ask_drain(7)), daemon=True).start()
    drained = threading.Event()
    job._restart._wait_for_end = drained.set  # type: ignore[method-assign]
    first = job.progress.optimizer_steps
    used: list[int] = []
    ids: list[int] = []
    for _ in job.epochs(6):
        for x, y, batch_ids in loader:
            if 7 in job._restart._drained:
                break
            used, ids = used + ids, batch_ids.tolist() if loader.data.local_samples else []
            train_step(job, optimizer, x, y)
            if job.sync_gradients:
                scheduler.step()
            if after >= 0:
                time.sleep(0.002)
        if 7 in job._restart._drained:
            break
    used += ids
    if job.is_main and after >= 0:
        assert drained.is_set()
    step = job.progress.optimizer_steps
    assert step > first
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return step, job.progress.samples, used, weights, scheduler.last_epoch  # type: ignore[return-value]


def test_all_ranks_stop_after_the_same_step_and_resume_elsewhere(ranks: Any, tmp_path: Path) -> None:
    """1 -> 4 -> 2 ranks, drained twice in mid-epoch: an undisturbed run's weights, no example lost or repeated."""
    undisturbed = stop(str(tmp_path / "whole"), -1.0)
    here = str(tmp_path / "moved")
    used: list[int] = []
    samples = 0
    for size, after in ((1, 0.02), (4, 0.05), (2, -1.0)):
        env = {"POLLUX_DRAIN_WAIT": "0"}
        results = ranks(size, stop, here, after, env=env)
        assert len({r[0] for r in results}) == 1, "ranks stopped at different steps"
        assert all(r[1] == results[0][1] for r in results)
        assert all(torch.equal(r[3], results[0][3]) for r in results)
        used += [i for r in results for i in r[2]]
        assert results[0][1] > samples
        samples = results[0][1]
        assert len(used) == samples, "an example was used and not counted, or counted and not used"
    assert samples == undisturbed[1] == 6 * EXAMPLES
    assert torch.bincount(torch.tensor(used), minlength=EXAMPLES).eq(6).all()
    assert results[0][4] == undisturbed[4], "the scheduler went on where it was"
    torch.testing.assert_close(results[0][3], undisturbed[3], rtol=1e-4, atol=1e-5)


def adapt_and_finish(directory: str, epochs: int) -> tuple[int | None, int, bool]:
    """(batch size that the checkpoint carried, the one at the end, whether a model of its times was known)."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = attach(model, optimizer, adaptive=True, sampling=1, checkpoint_dir=directory)
    loader = job.loader(data(), 12, max_batch_size=96, per_gpu=(1, 48))
    known = job.stepper.advisor is None or job.params is not None
    carried = job._restart.known.batch_size if job._restart.known is not None else None
    for epoch in job.epochs(epochs):
        for x, y, _ids in loader:
            train_step(job, optimizer, x, y)
        if job.stepper.advisor is not None and epoch == 1:
            job.stepper.advisor.close()
            job.stepper.advisor.advise()  # a fit for the checkpoint to carry
            job.stepper.advisor.proposal = BatchChoice(12, 3)
    return carried, job.batch_size, known


def test_a_restart_knows_the_batch_size_and_the_throughput_model(ranks: Any, tmp_path: Path) -> None:
    assert adapt_and_finish(str(tmp_path), 6) == (None, 48, False)
    for carried, _, known in ranks(2, adapt_and_finish, str(tmp_path), 7):
        assert carried == 48
        assert known


def test_periodic_checkpoints_are_written_beside_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLLUX_CHECKPOINT_INTERVAL", "0.02")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = attach(model, optimizer, adaptive=False, checkpoint_dir=tmp_path)
    loader = job.loader(data(), 16)
    steps = []
    for _ in job.epochs(40):
        for x, y, _ids in loader:
            train_step(job, optimizer, x, y)
            time.sleep(0.001)
            if job._restart._saved is not None:
                steps.append(job._restart._saved)
        if len(set(steps)) >= 3:
            break
    job.close()
    assert len(set(steps)) >= 3
    again = network()
    resumed = attach(again, torch.optim.SGD(again.parameters(), lr=0.01), checkpoint_dir=tmp_path)
    assert resumed.progress.optimizer_steps >= steps[-1]
    resumed.close()


def test_a_disk_that_is_full_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("POLLUX_CHECKPOINT_INTERVAL", "0.01")

    def full(*_: Any, **__: Any) -> None:
        raise CheckpointError("no space left for a checkpoint")

    monkeypatch.setattr("pollux.checkpoint.CheckpointStore.save", full)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = attach(model, optimizer, adaptive=False, checkpoint_dir=tmp_path)
    loader = job.loader(data(), 16)
    for _ in job.epochs(3):
        for x, y, _ids in loader:
            train_step(job, optimizer, x, y)
            time.sleep(0.002)
    job.close()
    assert job.progress.samples == 3 * EXAMPLES
    assert "no space left" in caplog.text


def shared_or_not(directory: str) -> str:
    """Attach with a checkpoint that only rank 0 can see."""
    model = network()
    mine = directory if os.environ["RANK"] == "0" else directory + "-elsewhere"
    try:
        attach(model, torch.optim.SGD(model.parameters(), lr=0.01), checkpoint_dir=mine)
    except CheckpointError as error:
        return str(error)
    return "attached"


def test_ranks_that_see_different_checkpoints_say_so(ranks: Any, tmp_path: Path) -> None:
    adapt_and_finish(str(tmp_path), 1)
    for message in ranks(2, shared_or_not, str(tmp_path)):
        assert "file system that all nodes share" in message
