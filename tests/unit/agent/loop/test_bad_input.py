"""What a training must survive, or refuse with a word that helps."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pollux import Job, attach
from pollux.checkpoint.checkpoint_store import CheckpointStore
from pollux.checkpoint.fruitless import FruitlessRestarts
from pollux.errors import (
    BatchError,
    CheckpointError,
    DataError,
    ForeignCheckpoint,
    LaunchError,
    PolluxAgentError,
    RankLost,
    RestartLoop,
    StateError,
)
from pollux.loop.slips import OWN_PASSES
from pollux.ranks.control import ControlExchange
from pollux.ranks.world import join
from tests.unit.agent.loop.mistakes_page import on_the_page
from tests.unit.agent.regression import sums as data
from tests.unit.agent.regression import train
from tests.unit.agent.regression import train_step as step


def start(width: int = 4, **options: Any) -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return attach(model, optimizer, **{"adaptive": False, **options})


# -- sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "options", "words"),
    [
        ("32", {}, "expected batch_size as a whole number of examples, got '32'"),
        (32.5, {}, "expected batch_size as a whole number"),
        (32, {"max_batch_size": "64"}, "expected max_batch_size as a whole number of examples, got '64'"),
        (32, {"per_gpu": 64}, r"expected per_gpu=\(least, most\).*got 64"),
        (32, {"per_gpu": (1, 2, 3)}, r"expected per_gpu=\(least, most\)"),
    ],
)
def test_sizes_of_a_wrong_type(size: Any, options: dict[str, Any], words: str) -> None:
    job = start()
    with pytest.raises(BatchError, match=words):
        job.loader(data(), size, **options)
    job.close()


def test_swapped_arguments() -> None:
    model = nn.Linear(6, 1)
    with pytest.raises(
        PolluxAgentError, match=r"first argument of attach, got SGD: attach\(model, optimizer\)"
    ):
        attach(torch.optim.SGD(model.parameters(), lr=0.1), model)  # type: ignore[arg-type]


def test_a_second_attach_of_an_optimizer_needs_the_first_closed() -> None:
    job = start()
    with pytest.raises(PolluxAgentError, match="was attached before, and that job is still open"):
        attach(job.module, job.optimizer)
    job.close()
    attach(job.module, job.optimizer).close()


@pytest.mark.parametrize("own", [True, False])
def test_a_loop_over_own_epochs_is_told_of_once(own: bool, caplog: pytest.LogCaptureFixture) -> None:
    job = start()
    loader = job.loader(data(), 32)
    for _ in range(3) if own else job.epochs(3):
        for x, y in loader:
            step(job, x, y)
    job.close()
    assert caplog.text.count("this loop is not one over job.epochs") == own


@pytest.mark.parametrize(("own", "largest"), [(True, 256), (True, None), (False, 256)])
def test_a_loop_with_passes_of_its_own_is_warned_of_once(
    own: bool, largest: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch size that stays needs none."""
    job = start(adaptive=None)
    loader = job.loader(data(), 32, max_batch_size=largest)
    for _ in job.epochs(2):
        for x, y in loader:
            if own:
                mse_loss(job.model(x), y).backward()
                job.optimizer.step()
            else:
                step(job, x, y)
    job.close()
    assert caplog.text.count(OWN_PASSES) == (own and largest is not None)
    assert on_the_page(OWN_PASSES)


# -- the launch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"WORLD_SIZE": "2"}, "RANK, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "from 0 to 1"),
        ({"WORLD_SIZE": "2", "RANK": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "got 'x'"),
        ({"WORLD_SIZE": "many"}, "whole number"),
    ],
)
def test_an_environment_that_makes_no_sense(environ: dict[str, str], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        join(torch.device("cpu"), environ)


# -- the ranks ------------------------------------------------------------------------------------------------


def leave_early() -> tuple[str, float]:
    job = start()
    begun = time.monotonic()
    try:
        for n, (x, y) in enumerate(job.loader(data(6400), 8)):
            if n == 5 and job.rank == 1:
                return "left", 0.0
            step(job, x, y)
    except RankLost as error:
        return str(error), time.monotonic() - begun
    return "never noticed", 0.0


def test_a_rank_that_ends_early_is_noticed_by_the_others(ranks: Any) -> None:
    said, seconds = ranks(2, leave_early)[0]
    assert "another rank ended" in said
    assert seconds < 60


def masks(directory: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What is drawn between `attach` and the loop, and in the loop."""
    job = start(checkpoint_dir=directory)
    loader = job.loader(data(), 16, per_gpu=(1, 16))
    split = torch.randperm(64)
    drawn = torch.empty(0)
    for _ in job.epochs(1 if directory is None or not list(Path(directory).glob("checkpoint-*")) else 2):
        for x, y in loader:
            drawn = drawn if drawn.numel() else torch.nn.functional.dropout(torch.ones(256))
            step(job, x, y)
    job.close()
    return split, drawn


def test_ranks_seeded_alike_draw_other_dropout_masks_but_split_data_alike(ranks: Any, tmp_path: Path) -> None:
    (split, first), (other, second) = ranks(2, masks)
    assert torch.equal(split, other)
    assert not torch.equal(first, second)
    attempts = [ranks(size, masks, str(tmp_path)) for size in (2, 3)]
    assert all(torch.equal(split, found[0]) for attempt in attempts for found in attempt)
    masks_of = [tuple(found[1].tolist()) for attempt in attempts for found in attempt]
    assert len(set(masks_of)) == 5, "a restart draws on, and a rank that is new draws its own"
    # Rank 0 goes on as the script has seeded it, as one GPU would: nothing changes there.
    alone_split, alone = masks()
    assert torch.equal(split, alone_split)
    torch.testing.assert_close(alone, first)


@pytest.mark.parametrize("share", [0, -0.1, 1.5, "1 %", None])
def test_a_share_of_the_time_that_is_none_is_refused(share: Any) -> None:
    with pytest.raises(PolluxAgentError, match="expected measure_share as a share of the time"):
        start(measuring={"measure_share": share})


def test_an_unknown_word_of_measuring_is_refused() -> None:
    with pytest.raises(
        PolluxAgentError, match="expected measuring with measure_share, every, decay, got evry"
    ):
        start(measuring={"evry": 1})


# -- the loss -------------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_costs_no_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("POLLUX_CHECKPOINT_INTERVAL", "0")
    monkeypatch.setenv("POLLUX_EXCHANGE_INTERVAL", "0")
    job = start(checkpoint_dir=tmp_path, measuring={"every": 1})
    for n, (x, y) in enumerate(job.loader(data(), 4, per_gpu=(4, 4))):
        with job.micro_batch():
            job.backward(mse_loss(job.model(x), y) * (float("nan") if n == 9 else 1.0))
        job.optimizer.step()
        job.optimizer.zero_grad()
    skipped = job.training.models[0].averages.skipped
    job.close()
    assert job.progress.samples == 64, "as in plain PyTorch, training goes on"
    assert skipped >= 1
    assert "not finite" in caplog.text
    again = start(checkpoint_dir=tmp_path)
    assert 0 < again.progress.optimizer_steps < 10
    assert all(bool(p.isfinite().all()) for p in again.module.parameters())
    again.close()


# -- checkpoints ----------------------------------------------------------------------------------------------


def test_another_models_checkpoint_is_refused_and_left(tmp_path: Path) -> None:
    save_one(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ForeignCheckpoint, match=r"another training.*parameters"):
        start(width=5, checkpoint_dir=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_stale_checkpoint_in_the_middle_of_other_data_is_refused(tmp_path: Path) -> None:
    job = start(checkpoint_dir=tmp_path)
    loader = job.loader(data(), 16)
    for _ in job.epochs(1):
        for batch in loader:
            step(job, *batch)
            break
        break
    job.close()
    job = start(checkpoint_dir=tmp_path)
    with pytest.raises(DataError, match=r"64 samples .* 65 now.*restore the dataset"):
        job.loader(data(65), 16)
    job.close()


def test_other_data_are_refused_at_the_end_of_a_pass_too(tmp_path: Path) -> None:
    save_one(tmp_path)
    job = start(checkpoint_dir=tmp_path)
    with pytest.raises(DataError, match="restore the dataset"):
        job.loader(data(48), 16)
    job.close()


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    save_one(tmp_path)
    store = CheckpointStore(tmp_path)
    state, meta = store.read(store.paths()[-1])
    store.save(state | {"version": 99}, meta=meta | {"optimizer_steps": 10_000})
    with pytest.raises(CheckpointError, match="expected a checkpoint of version"):
        start(checkpoint_dir=tmp_path)


class Own:
    """State of the user's own with an object in it."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 3, "best": [Path("/model")]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


def test_state_that_no_checkpoint_can_hold_is_refused_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"user\['best'\]\[0\] is a pathlib.*PosixPath.*return only numbers"):
        start(checkpoint_dir=tmp_path, state=Own())
    assert not list(tmp_path.glob("checkpoint-*"))


def save_one(directory: Path) -> None:
    job = start(checkpoint_dir=directory)
    loader = job.loader(data(), 16)
    train(job, loader, 1, statistical=True)
    job.close()


def see_foreign(directory: str) -> str:
    """Rank 0 alone finds that the checkpoint is another's."""
    try:
        start(width=9, checkpoint_dir=directory)
    except ForeignCheckpoint as error:
        return str(error)
    return "attached"


def test_all_ranks_refuse_what_rank_0_refuses(ranks: Any, tmp_path: Path) -> None:
    save_one(tmp_path)
    first, second = ranks(2, see_foreign, str(tmp_path))
    assert first == second != "attached"


def test_a_full_disk_is_told_and_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_one(tmp_path)
    monkeypatch.setenv("POLLUX_CHECKPOINT_INTERVAL", "0")
    monkeypatch.setenv("POLLUX_EXCHANGE_INTERVAL", "0")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pollux.checkpoint.checkpoint_store.write_checkpoint", full)
    job = start(checkpoint_dir=tmp_path)
    loader = job.loader(data(), 16)
    train(job, loader, 2, statistical=True)
    job.close()
    assert job.progress.optimizer_steps == 8
    assert "no space left" in caplog.text
    found = CheckpointStore(tmp_path).newest()
    assert found is not None
    assert CheckpointStore(tmp_path).read(found)[1]["optimizer_steps"] == 4


# -- restarts -------------------------------------------------------------------------------------------------

ALONE = ControlExchange(None, 1)
AUTOMATIC = {"SLURM_RESTART_COUNT": "3"}


def test_restarts_that_come_to_nothing_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(4):
        FruitlessRestarts(tmp_path, 4, AUTOMATIC).begin(ALONE)
    with pytest.raises(RestartLoop, match=r"4 restarts in a row.*remove"):
        FruitlessRestarts(tmp_path, 4, AUTOMATIC).begin(ALONE)
    FruitlessRestarts(tmp_path, 4, {}).begin(ALONE)  # a person's doing
    attempt = FruitlessRestarts(tmp_path, 4, AUTOMATIC)
    attempt.begin(ALONE)
    assert json.loads((tmp_path / "restarts.json").read_text()) == {"restarts": 1}
    attempt.checkpointed()
    assert [path.name for path in tmp_path.iterdir()] == [".in-use"]


def test_a_checkpoint_makes_restarts_count_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("POLLUX_FRUITLESS_RESTARTS", "2")
    for _ in range(2):
        job = start(checkpoint_dir=tmp_path)
    save = job.coordinator.checkpointer.writer
    assert save is not None
    with pytest.raises(RestartLoop):
        start(checkpoint_dir=tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    save_one(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for _ in range(2):
        start(checkpoint_dir=tmp_path).close()


def loop(directory: str) -> str:
    try:
        start(checkpoint_dir=directory)
    except RestartLoop:
        return "refused"
    return "attached"


def test_all_ranks_hear_of_the_loop(ranks: Any, tmp_path: Path) -> None:
    for _ in range(11):
        answers = ranks(
            2, loop, str(tmp_path), env={"POLLUX_RESTARTS": "1", "POLLUX_FRUITLESS_RESTARTS": "1"}
        )
        if answers != ["attached", "attached"]:
            break
    assert answers == ["refused", "refused"]


def test_an_optimizer_whose_steps_no_hook_sees_is_refused() -> None:
    own = {"__init__": lambda _: None, "step": lambda _: None}
    with pytest.raises(PolluxAgentError, match="in the class's own __init__"):
        attach(nn.Linear(6, 1), type("Lookahead", (torch.optim.Optimizer,), own)())
