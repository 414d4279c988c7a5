"""A script attaches several trainings, one after another; a restart finds each of them again."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from pollux import attach
from pollux.checkpoint.checkpoint_store import CheckpointStore
from pollux.errors import PolluxAgentError
from pollux.ranks.node_memory import NO_COPIES, NodeMemory, hand_on
from pollux.slurm_job import attempt as attempts
from pollux.slurm_job.job_memory import RESERVE
from pollux.slurm_job.trainings import Attached
from tests.unit.agent.regression import network

pytestmark = pytest.mark.one_process


class Died(Exception):
    """The process was killed at this place."""


@contextlib.contextmanager
def a_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that ends by itself, or dies."""
    monkeypatch.setattr(attempts, "attached", Attached())
    with contextlib.suppress(Died):
        yield


def data(seed: int) -> TensorDataset:
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True) + seed)


def train(
    model: torch.nn.Module, seed: int, *, restarts_at: int = -1, epochs: int = 2, **options: Any
) -> tuple[int, float]:
    """A training of 3 steps an epoch; returns its steps in this life, and the sum of its weights."""
    trained = [each for each in model.parameters() if each.requires_grad]
    job = attach(model, torch.optim.SGD(trained, 0.05, momentum=0.9), adaptive=False, **options)
    loader = job.loader(data(seed), 16)
    steps = 0
    for _ in job.epochs(epochs):
        for x, y in loader:
            if steps == restarts_at:
                job.coordinator.save(durable=True)
                job.coordinator.close()
                raise Died
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
            steps += 1
    job.close()
    return steps, sum(float(each.detach().double().sum()) for each in model.parameters())


def fold(number: int, **options: Any) -> tuple[int, float]:
    torch.manual_seed(number)
    return train(torch.nn.Linear(4, 1), number, **options)


def folds(folder: Path | None, *, restarts_in: int = -1, **options: Any) -> list[tuple[int, float]]:
    """Three folds; the script dies in one of them, after the fourth step."""
    place = {} if folder is None else {"checkpoint_dir": folder}
    return [fold(k, restarts_at=4 if k == restarts_in else -1, **place, **options) for k in range(3)]


@pytest.fixture
def alone() -> list[tuple[int, float]]:
    """Each fold in a training of its own, without checkpoints."""
    return folds(None)


def test_each_fold_trains_and_a_restart_goes_on_in_the_interrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: list[tuple[int, float]]
) -> None:
    with a_process(monkeypatch):
        folds(tmp_path, restarts_in=1)
    with a_process(monkeypatch):
        again = folds(tmp_path)
        assert [steps for steps, _ in again] == [0, 2, 6]
        assert [weights for _, weights in again] == pytest.approx([weights for _, weights in alone])
    assert sorted(path.name for path in tmp_path.glob("attach-*")) == ["attach-2", "attach-3"]
    with a_process(monkeypatch):
        once_more = folds(tmp_path)
        assert [steps for steps, _ in once_more] == [0, 0, 0]
        assert [weights for _, weights in once_more] == pytest.approx([weights for _, weights in alone])


def phases(folder: Path, *, restarts_in: int = -1) -> list[int]:
    """The head first, then all layers, as the page on scripts says."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    steps = []
    for phase in range(2):
        model[0].requires_grad_(phase == 1)
        steps.append(train(model, 5, restarts_at=4 if phase == restarts_in else -1, checkpoint_dir=folder)[0])
    return steps


def test_a_second_phase_with_other_parameters_works_over_any_number_of_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, expected in ((0, None), (1, None), (-1, [0, 2]), (-1, [0, 0])):
        with a_process(monkeypatch):
            steps = phases(tmp_path, restarts_in=place)
            assert steps == expected


def test_folders_that_the_script_gives_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(*numbers: int) -> list[int]:
        return [fold(k, checkpoint_dir=tmp_path / f"fold-{k}")[0] for k in numbers]

    with a_process(monkeypatch):
        assert script(0, 1, 2) == [6, 6, 6]
    assert not list(tmp_path.rglob("attach-*"))
    with a_process(monkeypatch):
        assert script(2, 0, 1) == [0, 0, 0]


def test_names_find_trainings_where_the_script_skips_what_it_has_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_process(monkeypatch):
        for k in range(2):
            fold(k, checkpoint_dir=tmp_path, name=f"fold-{k}", restarts_at=4 if k else -1)
    with a_process(monkeypatch):
        assert fold(1, checkpoint_dir=tmp_path, name="fold-1")[0] == 2
        assert fold(2, checkpoint_dir=tmp_path, name="fold-2")[0] == 6
        with pytest.raises(PolluxAgentError, match="name of its own"):
            fold(2, checkpoint_dir=tmp_path, name="fold-2")
        with pytest.raises(PolluxAgentError, match="letters, digits"):
            fold(2, checkpoint_dir=tmp_path, name="../fold")


def test_ended_trainings_are_no_fruitless_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the job restarts in a later one."""
    monkeypatch.setenv("POLLUX_FRUITLESS_RESTARTS", "1")
    for count in range(4):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(count))
        with a_process(monkeypatch):
            folds(tmp_path, restarts_in=2)
    assert not (tmp_path / "restarts.json").exists()


def test_a_copy_in_memory_of_one_training_is_never_restored_into_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: list[tuple[int, float]]
) -> None:
    """The launcher's memory outlives its workers. Names are given in another order after the loss."""
    monkeypatch.setenv("POLLUX_EXCHANGE_INTERVAL", "0")
    memory = NodeMemory(1)
    hand_on(memory)
    try:
        with a_process(monkeypatch):
            for k in range(2):
                fold(k, checkpoint_dir=tmp_path, name=f"fold-{k}", restarts_at=4 if k else -1)
        assert memory.copies(0), "the second training was copied"
        with a_process(monkeypatch):
            for k in (2, 1, 0):
                steps, weights = fold(k, checkpoint_dir=tmp_path, name=f"fold-{k}")
                assert weights == pytest.approx(alone[k][1])
                assert steps == {2: 6, 0: 0}.get(k, steps)
    finally:
        hand_on(None)


def test_after_a_kill_a_copy_is_restored_and_no_more_are_made(
    monkeypatch: pytest.MonkeyPatch, alone: list[tuple[int, float]]
) -> None:
    """The launcher says so to the next ranks: two copies may be what the job had no memory for."""
    monkeypatch.setenv("POLLUX_EXCHANGE_INTERVAL", "0")
    memory = NodeMemory(1)
    hand_on(memory)
    try:
        with a_process(monkeypatch):
            fold(0, restarts_at=4)
        assert memory.copies(0)
        monkeypatch.setenv(NO_COPIES, "1")
        with a_process(monkeypatch):
            steps, weights = fold(0)
            assert steps < 6
            assert weights == pytest.approx(alone[0][1])
        assert not memory.copies(0)
        assert [os.fstat(slot.descriptor).st_size for slot in memory.slots[0]] == [0, 0]
    finally:
        hand_on(None)


def test_copies_leave_the_job_the_memory_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("POLLUX_EXCHANGE_INTERVAL", "0")
    monkeypatch.setattr("pollux.checkpoint.memory_tier.memory_left", lambda: RESERVE + 50)
    memory = NodeMemory(1)
    hand_on(memory)
    try:
        with a_process(monkeypatch):
            fold(0)
        assert not memory.copies(0)
        assert "no copies of the state in memory" in caplog.text
        assert "--mem" in caplog.text
    finally:
        hand_on(None)


def test_a_checkpoint_is_written_in_place_of_a_copy_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the training, the agent holds two copies of a small state, and not three."""
    monkeypatch.setenv("POLLUX_EXCHANGE_INTERVAL", "0")
    monkeypatch.setattr("pollux.checkpoint.memory_tier.COST", math.inf)
    memory, held = NodeMemory(1), []
    hand_on(memory)
    write = CheckpointStore.save

    def seen(self: CheckpointStore, *args: Any, **options: Any) -> Path:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.2)  # the training goes on, and asks for copies
            held.append([os.fstat(slot.descriptor).st_size > 0 for slot in memory.slots[0]])
        return write(self, *args, **options)

    monkeypatch.setattr(CheckpointStore, "save", seen)
    monkeypatch.setenv("POLLUX_CHECKPOINT_INTERVAL", "0.001")
    try:
        with a_process(monkeypatch):
            fold(0, checkpoint_dir=tmp_path, epochs=6)
    finally:
        hand_on(None)
    assert held
    assert max(map(sum, held)) <= 1, "one of the two, and the one that is written"


def test_several_fits_of_one_script_have_places_of_their_own_on_every_rank(
    ranks: Any, tmp_path: Path
) -> None:
    def script(folder: str) -> list[int]:
        return [steps for steps, _ in folds(Path(folder))]

    for expected in ([6, 6, 6], [0, 0, 0]):
        assert ranks(2, script, str(tmp_path)) == [expected, expected]
    assert network() is not None
    assert "POLLUX_RUN" not in os.environ
