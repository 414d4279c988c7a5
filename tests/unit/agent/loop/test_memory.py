"""The device runs out of memory.

The agent catches the error and turns it into a bound, without losing a sample.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from pollux import attach
from pollux.errors import BatchError
from pollux.training.memory import FILE, MemoryBounds, is_out_of_memory

EXAMPLES = 101


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(EXAMPLES, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True), torch.arange(EXAMPLES))


class Fails(nn.Module):
    """Raise as CUDA does for a batch above `most`, after `healthy` passes.

    The forward pass raises, or the backward pass with `backward`.
    """

    def __init__(self, most: int, healthy: int = 0, *, backward: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 1)
        self.most, self.healthy, self.backward, self.passes = most, healthy, backward, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        out: torch.Tensor = self.inner(x)
        if len(x) > self.most and self.passes > self.healthy:
            if not self.backward:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
            out.register_hook(self._fail)
        return out

    def _fail(self, grad: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: out of memory")


def train(
    model: Fails, directory: Path | None = None, *, per_gpu: tuple[int, int] = (2, 32), **options: Any
) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = attach(model, optimizer, checkpoint_dir=directory, **options)
    loader = job.loader(data(), 32, per_gpu=per_gpu)
    seen: list[int] = []
    steps = []
    for _ in job.epochs(1):
        uncounted: list[int] = []
        for x, y, ids in loader:
            with job.micro_batch():
                job.backward(mse_loss(job.model(x), y))
                uncounted += ids.tolist()
            if job.sync_gradients:
                assert all(p.grad is not None for p in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
                steps.append((job.local_batch, job.accumulation))
                seen, uncounted = seen + uncounted, []
    job.close()
    return job, seen, steps


@pytest.mark.parametrize("backward", [False, True])
def test_one_rank_takes_the_step_again_in_smaller_passes(backward: bool) -> None:
    model = Fails(20, healthy=2, backward=backward)
    job, seen, steps = train(model, measuring={"every": 1000})
    assert sorted(seen) == list(range(EXAMPLES)), "no sample lost, none used twice"
    assert (job.limits.local_max, job.batch_size) == (16, 32), "the bound is kept, and the batch size too"
    assert (16, 1) in steps


def test_the_failed_step_is_the_one_that_plain_training_takes() -> None:
    whole, halved = Fails(1000), Fails(20)
    train(whole, measuring={"every": 1000})
    train(halved, measuring={"every": 1000})
    for one, other in zip(whole.parameters(), halved.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_batch_at_the_bound_is_halved_again() -> None:
    job, _, _ = train(Fails(10), measuring={"every": 1000})
    assert (job.limits.local_max, job.batch_size) == (8, 32)


def test_memory_that_runs_out_for_every_batch_is_an_error() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        train(Fails(0), measuring={"every": 1000})


def test_a_batch_that_may_not_shrink_is_an_error() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        train(Fails(20), per_gpu=(20, 32), measuring={"every": 1000})


def test_other_errors_are_the_users() -> None:
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(MemoryError())


def test_the_bound_outlives_the_process_and_is_held_to(tmp_path: Path) -> None:
    train(Fails(20), tmp_path, measuring={"every": 1000})
    job, _, _ = train(Fails(20), tmp_path, measuring={"every": 1000})
    assert job.limits.local_max == 16
    with pytest.raises(BatchError, match="lower it to 16"):
        train(Fails(20), tmp_path, per_gpu=(20, 32))
    (tmp_path / FILE).write_text("{ half a file")
    job, _, _ = train(Fails(20), tmp_path, measuring={"every": 1000})
    assert job.limits.local_max == 16, "the checkpoint holds it too"


def test_ranks_that_run_out_together_do_not_spoil_each_others_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (MemoryBounds(torch.device("cpu"), tmp_path) for _ in range(2))
    first.load_state_dict({"cpu": 16})
    second.load_state_dict({"cpu": 8})
    original, met = os.fsync, []

    def meanwhile(descriptor: int) -> None:
        original(descriptor)
        if not met:
            met.append(descriptor)
            second.lower(8)  # another rank, while this one's file is not in its place yet

    monkeypatch.setattr(os, "fsync", meanwhile)
    first.lower(16)
    assert met
    assert not caplog.messages
    assert json.loads((tmp_path / FILE).read_text()) == {"cpu": 16}, "whole, and the last one's"
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


SCRIPT = f"""
import json, sys
import torch
from every_sample import Training

training = Training(checkpoint_dir=sys.argv[1])
job = training.job

def fail(number, size):
    if job.rank == 1 and size > 10 and number > 5:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

training.run(job.loader(training.data({EXAMPLES}), 32, per_gpu=(1, 32)), 2, fail)
if job.is_main:
    print(json.dumps({{"ids": training.used.ids, "local_max": job.limits.local_max, "m": job.local_batch}}))
"""


@pytest.mark.slow
def test_several_ranks_start_again_from_the_checkpoint_with_the_bound(tmp_path: Path) -> None:
    script, checkpoints = tmp_path / "train.py", tmp_path / "checkpoints"
    script.write_text(SCRIPT)
    here = Path(__file__).parents[1]
    search_path = f"{here.parents[2]}/agent:{here}"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pollux.launcher.launch",
            "run",
            "--nproc",
            "2",
            str(script),
            str(checkpoints),
        ],
        env={**os.environ, "PYTHONPATH": search_path, "POLLUX_CHECKPOINT_INTERVAL": "0.001"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1" in done.stderr
    assert "do not fit into the memory" in done.stderr
    assert "starting all ranks again" in done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["local_max"], result["m"]) == (8, 8)
    assert Counter(result["ids"]) == dict.fromkeys(range(EXAMPLES), 2), "every sample once in each pass"
    assert json.loads((checkpoints / FILE).read_text()) == {"cpu": 8}


@pytest.mark.parametrize("second_too", [False, True])
def test_with_several_models_the_whole_batch_is_taken_again(second_too: bool) -> None:
    """A failed pass of the first model voids the second model's pass.

    The loop goes on to the second model's pass after the failure.
    """

    def weights(most: int) -> list[torch.Tensor]:
        first, second = Fails(most), Fails(most if second_too else 1000)
        one, two = (torch.optim.SGD(model.parameters(), lr=0.01) for model in (first, second))
        job = attach(first, one, measuring={"every": 1000})
        other = job.add_model("second", second, two)
        loader = job.loader(data(), 32, per_gpu=(2, 32))
        used: list[int] = []
        for _ in job.epochs(1):
            fresh: list[int] = []
            for x, y, ids in loader:
                with job.micro_batch():
                    job.backward(mse_loss(job.model(x), y))
                    fresh += ids.tolist()
                with other.micro_batch():
                    other.backward(mse_loss(other.model(x), -y))
                if job.sync_gradients:
                    for optimizer in (one, two):
                        optimizer.step()
                        optimizer.zero_grad()
                    used, fresh = used + fresh, []
        job.close()
        assert sorted(used) == list(range(EXAMPLES))
        return [*first.parameters(), *second.parameters()]

    for whole, halved in zip(weights(1000), weights(20), strict=True):
        torch.testing.assert_close(whole, halved)


def test_ranks_that_keep_asking_for_another_start_get_three(tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    script.write_text("import sys; print('started'); sys.exit(75)")
    agent = Path(__file__).parents[4] / "agent"
    # Skip the import of torch, because this script does not use it.
    launch = (
        "import sys; from pollux.launcher import launch, node; "
        "sys.exit(launch.main(sys.argv[1:], preload=()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", launch, "run", str(script)],
        env={**os.environ, "PYTHONPATH": str(agent)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout.count("started")) == (75, 4), done.stderr


def test_a_step_that_is_taken_again_counts_once() -> None:
    """One model has stepped already when the other one's pass fails."""
    first, second = Fails(1000), Fails(20)
    one, two = (torch.optim.SGD(model.parameters(), lr=0.01) for model in (first, second))
    job = attach(first, one, measuring={"every": 1000})
    other = job.add_model("second", second, two)
    for x, y, _ in job.loader(data(), 32, per_gpu=(2, 32)):
        with job.micro_batch():
            job.backward(mse_loss(job.model(x), y))
        if job.sync_gradients:
            one.step()
        with other.micro_batch():
            other.backward(mse_loss(other.model(x), -y))
        if job.sync_gradients:
            two.step()
            one.zero_grad()
            two.zero_grad()
    job.close()
    assert (job.progress.optimizer_steps, job.progress.samples) == (4, EXAMPLES)
    assert job.progress.examples == pytest.approx(EXAMPLES)
