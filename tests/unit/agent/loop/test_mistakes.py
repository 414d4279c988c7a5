"""Mistakes of training loops: harmless, or named with the line to change."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pollux import Job, attach
from pollux.errors import LoopMistake, PolluxAgentError, RankLost, RanksDiffer
from pollux.loop.endings import Reason
from pollux.loop.slips import MIXED
from tests.unit.agent.loop.mistakes_page import on_the_page
from tests.unit.agent.regression import attached, data, logged, network, train, train_step

SGD = torch.optim.SGD


def started(m0: int = 32, m: int = 8, **options: Any) -> tuple[Job, Any, Any]:
    """A job of one rank whose steps take m0 / m passes."""
    job = attached(**options)
    return job, job.optimizer, job.loader(data(), m0, per_gpu=(1, m))


def parameters(job: Job) -> Tensor:
    return torch.cat([p.detach().flatten() for p in job.module.parameters()])


def trained(zero: str) -> Tensor:
    """A pass through the data; gradients are zeroed where `zero` says."""
    job, optimizer, loader = started()
    for _ in job.epochs(1):
        for x, y, _ in loader:
            if zero == "top":
                optimizer.zero_grad()
            with job.micro_batch():
                if zero == "context":
                    optimizer.zero_grad()
                job.backward(mse_loss(job.model(x), y))
            if job.sync_gradients:
                optimizer.step()
            if zero == "bottom" or (zero == "right" and job.sync_gradients):
                optimizer.zero_grad()
    found = parameters(job)
    job.close()
    assert "zero_grad" not in vars(optimizer)
    return found


@pytest.mark.parametrize("zero", ["top", "context", "bottom"])
def test_gradients_of_earlier_passes_outlive_a_misplaced_zero_grad(zero: str) -> None:
    torch.testing.assert_close(trained(zero), trained("right"))


def test_zero_grad_works_outside_of_steps_and_after_the_last_pass() -> None:
    job, optimizer, loader = started()
    for _ in job.epochs(1, statistical=True):
        for x, y, _ in loader:
            with job.micro_batch():
                job.backward(mse_loss(job.model(x), y))
            if job.sync_gradients:
                optimizer.zero_grad()  # a step that the script gives up
                assert all(p.grad is None for p in job.module.parameters())
                break
        break
    job.close()


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_the_model_zeroes_in_mid_step_are_missed(to_none: bool) -> None:
    job, optimizer, loader = started()

    def train() -> None:
        for x, y, _ in loader:
            job.module.zero_grad(to_none)
            with job.micro_batch():
                job.backward(mse_loss(job.model(x), y))
            if job.sync_gradients:
                optimizer.step()

    with pytest.raises(LoopMistake, match="pass 1 of 4") as told:
        train()
    assert on_the_page(told.value)
    job.close()


@pytest.mark.parametrize("reaches", [True, False])
def test_a_loss_that_reaches_another_models_gradients_is_told_of(reaches: bool) -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(6, 6), nn.Linear(6, 1)
    generating, judging = SGD(generator.parameters(), lr=0.01), SGD(critic.parameters(), lr=0.01)
    job = attach(generator, generating, adaptive=False)
    other = job.add_model("critic", critic, judging)
    loader = job.loader(data(), 32, per_gpu=(1, 8))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for x, _, _ in loader:
            with other.micro_batch():
                other.backward(
                    (other.model(x) - 1).square().mean() + other.module(generator(x).detach()).mean()
                )
            critic.requires_grad_(reaches)
            with job.micro_batch():
                job.backward(-other.module(job.model(x)).mean())
            critic.requires_grad_(True)
            if job.sync_gradients:
                judging.step()
                generating.step()
                judging.zero_grad()
                generating.zero_grad()
                break
    job.close()
    messages = {str(each.message) for each in told}
    assert messages == ({MIXED} if reaches else set())
    assert on_the_page(MIXED)


def test_a_step_in_a_pass_that_is_not_the_last_is_refused_with_the_line_to_change() -> None:
    job, optimizer, loader = started()
    x, y, _ = next(iter(loader))
    with job.micro_batch():
        job.backward(mse_loss(job.model(x), y))
    before = parameters(job).clone()
    with pytest.raises(LoopMistake, match=r"pass 1 of 4.*if job\.sync_gradients:") as told:
        optimizer.step()
    assert on_the_page(told.value)
    assert torch.equal(parameters(job), before)
    job.close()


def bare_model() -> str:
    """Call the script's own model in the loop: no gradient is averaged."""
    job = attached(1e-5)
    steps = 0
    try:
        for x, y, _ in job.loader(data(), 32):
            with job.micro_batch():
                job.backward(mse_loss(job.module(x), y))
            if job.sync_gradients:
                job.optimizer.step()
                job.optimizer.zero_grad()
                steps += 1
    except RanksDiffer as error:
        return f"{steps}: {error}"
    return "silence"


def one_rank_changes_a_parameter(tmp: str | None, how: str = "") -> str:
    """Double a parameter on one rank, or change its last bits, long after the first steps.

    The next checkpoint is refused. After it the loop goes on to its end, to a `break`, or to SIGTERM.
    """
    job = attached(0.01, checkpoint_dir=tmp)
    loader = job.loader(data(), 8)

    def change() -> None:
        if job.rank == job.world.size - 1:
            with torch.no_grad():
                factor = 1 + 2e-7 if how == "last bits" else 2.0
                job.module[0].weight.mul_(factor)  # type: ignore[operator, union-attr]

    try:
        for _ in job.epochs(2, statistical=True):
            for x, y, _ in loader:
                train_step(job, x, y)
                if job.progress.optimizer_steps == 12 and how != "change after a break":
                    change()
                    if how == "SIGTERM":
                        job.coordinator.endings.wanted = Reason.TERM
                if "break" in how and job.progress.optimizer_steps == 14:
                    break
            if "break" in how:
                break
        if how == "change after a break":
            change()
        job.close()
    except RanksDiffer as error:
        return str(error)
    return "silence"


def test_a_pass_through_the_bare_model_is_named_after_the_first_step(ranks: Any) -> None:
    for told in ranks(2, bare_model):
        assert told.startswith("1: after optimizer step 1 the parameters of rank 1 differ from rank 0's")
        assert on_the_page(told.removeprefix("1: "))


def leave_out(where: int) -> list[str]:
    """Two passes of a step; rank `where` leaves out the first one."""
    job, optimizer, loader = started()
    told = logged()
    for number, (x, y, _) in enumerate(loader):
        if number == 1 and job.rank == where:
            continue
        with job.micro_batch():
            job.backward(mse_loss(job.model(x), y))
        if job.sync_gradients:
            optimizer.step()
            break
    job.close()
    return told


def test_a_pass_that_one_rank_leaves_out_is_told_of(ranks: Any) -> None:
    assert ranks(1, leave_out, 0) == [[]]
    first, second = ranks(2, leave_out, 1)
    assert not first
    assert len(second) == 1
    assert on_the_page(second[0])


def test_the_rank_that_differs_by_a_bit_is_named_at_a_checkpoint(ranks: Any, tmp_path: Path) -> None:
    interval = {"POLLUX_CHECKPOINT_INTERVAL": "0", "POLLUX_EXCHANGE_INTERVAL": "0"}
    for told in ranks(3, one_rank_changes_a_parameter, str(tmp_path), "last bits", env=interval):
        assert "the parameters of rank 2 differ from rank 0's" in told


@pytest.mark.parametrize("how", ["", "break", "SIGTERM"])
def test_the_rank_that_differs_is_named_at_the_end(ranks: Any, tmp_path: Path, how: str) -> None:
    seldom = {} if how != "SIGTERM" else {"POLLUX_EXCHANGE_INTERVAL": "0"}
    for told in ranks(2, one_rank_changes_a_parameter, str(tmp_path), how, env=seldom):
        assert "the parameters of rank 1 differ from rank 0's" in told
    assert not list(tmp_path.glob("checkpoint-*"))


def test_the_rank_that_differs_is_named_without_a_folder(ranks: Any) -> None:
    for told in ranks(2, one_rank_changes_a_parameter, None):
        assert "the parameters of rank 1 differ from rank 0's" in told


def test_a_rank_may_load_its_best_weights_after_a_break(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, one_rank_changes_a_parameter, str(tmp_path), "change after a break") == ["silence"] * 2


# -- arguments ------------------------------------------------------------------------------------------------


def test_arguments_that_no_checkpoint_could_hold_are_refused_at_once() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        PolluxAgentError, match="expected state to have state_dict and load_state_dict, got list"
    ) as told:
        attach(model, optimizer, state=[0.0])  # type: ignore[arg-type]
    assert on_the_page(told.value)
    with pytest.raises(PolluxAgentError, match="expected scheduler to have state_dict"):
        attach(model, optimizer, lambda step: 1.0)
    with pytest.raises(PolluxAgentError, match=r"expected a torch\.optim\.Optimizer .* got Parameter"):
        attach(model, list(model.parameters()))  # type: ignore[arg-type]


def test_models_and_optimizers_that_cannot_be_resized_are_refused_with_the_reason() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = network()
    flat = nn.Sequential(model)
    flat[0].__class__ = type("Flat", (FullyShardedDataParallel,), {"__init__": nn.Module.__init__})
    with pytest.raises(PolluxAgentError, match="FSDP1") as told:
        attach(flat, SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    assert on_the_page(told.value)
    optimizer = SGD(network().parameters(), lr=0.1)
    optimizer.__class__ = type("Zero", (ZeroRedundancyOptimizer,), {})
    with pytest.raises(PolluxAgentError, match="ZeroRedundancyOptimizer") as told:
        attach(network(), optimizer)
    assert on_the_page(told.value)


# -- the end in the body --------------------------------------------------------------------------------------


def test_closing_in_the_body_keeps_the_step_and_its_place_together(tmp_path: Path) -> None:
    job, _, loader = started(m=32, checkpoint_dir=tmp_path)
    for _ in job.epochs(1, statistical=True):
        for x, y, _ in loader:
            train_step(job, x, y)
            job.close()
            break
        break
    stepped = parameters(job)
    again, _, loader = started(m=32, checkpoint_dir=tmp_path)
    torch.testing.assert_close(parameters(again), stepped)
    assert again.progress.optimizer_steps == 1
    assert loader.data.position == 32, "its examples would be trained on twice"
    again.close()


# -- one line -------------------------------------------------------------------------------------------------


def one_line(short: bool, amp: bool) -> tuple[Tensor, float]:
    torch.manual_seed(0)
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0) if amp else None
    job = attach(model, optimizer, scheduler, scaler=scaler, adaptive=False)
    for x, y, _ in job.loader(data(), 32, per_gpu=(1, 8)):
        if short:
            loss = job.step(lambda x=x, y=y: mse_loss(job.model(x), y), clip=0.05)
            assert loss is not None
            assert not loss.requires_grad
            continue
        with job.micro_batch():
            job.backward(mse_loss(job.model(x), y))
        if job.sync_gradients:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    job.close()
    return parameters(job), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("amp", [False, True])
def test_one_line_makes_the_same_steps_as_the_long_form(amp: bool) -> None:
    (short, rate), (long, wanted) = one_line(True, amp), one_line(False, amp)
    assert torch.equal(short, long)
    assert rate == wanted < 0.1


# -- a compiled model -----------------------------------------------------------------------------------------


def noise_of(compiled: bool) -> tuple[float, list[float]]:
    """The noise scale and the weights of two ranks that accumulate."""
    torch.manual_seed(0)
    job = attached(measuring={"every": 1})
    loader = job.loader(data(), 32, per_gpu=(1, 4))
    if compiled:
        job.model = torch.compile(job.model, backend="eager")
    train(job, loader, 6)
    (scale,) = job.training.models[0].averages.groups() or (None,)
    assert scale is not None
    found = parameters(job).tolist()
    job.close()
    return scale.var / scale.sqr, found


@pytest.mark.usefixtures("read_at_once")
def test_compiling_job_model_changes_neither_the_noise_scale_nor_the_weights(ranks: Any) -> None:
    (plain, weights), _ = ranks(2, noise_of, False)
    for scale, found in ranks(2, noise_of, True):
        assert scale == pytest.approx(plain, rel=0.01)
        assert found == pytest.approx(weights, rel=1e-4)


# -- what the user sees ---------------------------------------------------------------------------------------


def test_a_restore_and_a_finished_training_take_a_line_each(tmp_path: Path, capfd: Any) -> None:
    for _ in range(2):
        job, _, loader = started(m=32, checkpoint_dir=tmp_path)
        train(job, loader, 1, statistical=True)
        job.close()
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("pollux: ")]
    start = "pollux: batch size 32 on 1 GPU: 32 per GPU; M0 = 32, fixed; learning rate 0.05 by rule auto"
    end = lines.pop(1)
    assert re.fullmatch(
        r"pollux: finished: 7 optimizer steps, 203 examples; 29 in a batch on average \(M0 = 32\); "
        r"[0-9.e-]+ GPU hours, goodput [0-9.e+]+ examples/s per GPU(; noise scale .*)?",
        end,
    ), end
    assert lines == [
        start,
        f"pollux: restored the checkpoint in {tmp_path}: epoch 1, optimizer step 7",
        start,
        "pollux: already finished: 7 optimizer steps, 1 of 1 epochs. Epochs count from the beginning of the training",
    ]


def test_a_restart_with_another_batch_size_takes_a_line(tmp_path: Path, capfd: Any) -> None:
    for m0 in (32, 16):
        job, _, loader = started(m0=m0, checkpoint_dir=tmp_path)
        for x, y, _ in loader:
            train_step(job, x, y)
            if job.progress.optimizer_steps:
                break
        job.close()
    _, *lines = [line for line in capfd.readouterr().err.splitlines() if "M0 " in line or "restored" in line]
    assert lines == [
        f"pollux: restored the checkpoint in {tmp_path}: epoch 0, optimizer step 1",
        "pollux: batch size 16 on 1 GPU: 8 per GPU in each of 2 passes (before the restart: 32 on 1); M0 = 16, fixed; "
        "learning rate 0.05 by rule auto",
    ]


def test_progress_counts_the_step_in_hand(tmp_path: Path) -> None:
    job, optimizer, loader = started(checkpoint_dir=tmp_path)
    passes = 0
    for _ in job.epochs(1, statistical=True):
        for x, y, _ in loader:
            with job.micro_batch():
                job.backward(mse_loss(job.model(x), y))
            assert job.progress.optimizer_steps == passes // 4
            passes += 1
            if job.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
                assert (job.progress.optimizer_steps, job.progress.samples) == (passes // 4, passes * 8)
                assert job.progress.steps == passes / 4
            if passes == 12:
                job.poll()  # a checkpoint of now would hold the step's weights
                assert loader.data.position == 96
            if passes == 16:
                break
        break
    job.close()
    assert job.progress.optimizer_steps == 4
    assert loader.data.position == 128


def test_an_innocent_rank_prints_one_line() -> None:
    script = (
        "from pollux.ranks.world import print_lost_ranks_in_one_line as one_line\n"
        "from pollux.errors import RankLost\n"
        "one_line(3)\n"
        "raise RankLost('another rank ended\\nConnection closed')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "pollux: rank 3 ends: another rank ended\n"
    assert issubclass(RankLost, PolluxAgentError)
