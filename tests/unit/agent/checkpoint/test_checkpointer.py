"""When a checkpoint is due, what a joiner takes over, what a save says."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pollux.checkpoint import checkpointer as module
from pollux.checkpoint import training_state
from pollux.checkpoint.checkpoint_store import ALONE
from pollux.checkpoint.checkpointer import TRIAL_S, Checkpointer
from pollux.checkpoint.training_state import rng_state, set_rng_state, tell_ranks_apart
from pollux.checkpoint.writer import CheckpointWriter
from pollux.errors import CheckpointError

CPU = torch.device("cpu")
INTERVAL = 600.0


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Times:
    restored_at: float = 0.0


class Writer(CheckpointWriter):
    """A writer whose writing a test controls."""

    def __init__(self) -> None:
        self.sharded, self.saved, self.written, self.seconds = False, None, False, 0.0
        self.trouble, self._model, self.small = "", None, False
        self.writes = False
        self.calls: list[Any] = []
        self.fails: Exception | None = None

    @property
    def busy(self) -> bool:
        return self.writes

    def state(self, part: Any) -> Any:
        return part.state_dict()

    def wait(self) -> None:
        self.calls.append("wait")

    def prepare(self, parts: Any, *, rank: int) -> None:
        self.calls.append(("prepare", sorted(parts), rank))

    def save(self, parts: Any, rest: Any, meta: Any, *, rank: int, durable: bool, own: Any = None) -> None:
        if self.fails is not None:
            raise self.fails
        clock.now += 4.0
        self.calls.append(("save", sorted(parts), rest()["batch_size"], meta, rank, durable))


class Data:
    def __init__(self) -> None:
        self.loaded: Any = None

    def state_dict(self) -> Any:
        return {"position": 7}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


@dataclass
class Training:
    """As much of a training as a checkpoint holds."""

    model: torch.nn.Module = field(default_factory=lambda: torch.nn.Linear(2, 1))
    data: Data = field(default_factory=Data)
    last_step_at: float = 50.0

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.progress = SimpleNamespace(optimizer_steps=12, examples=384.0)
        self.models = [SimpleNamespace(module=self.model, record=SimpleNamespace(changed=str))]
        self.world = SimpleNamespace(rank=0, size=1, device=CPU, waiting=False, distributed=False)
        self.profile = SimpleNamespace(gpu_type="cpu")
        self.tied = ""

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def last_attempt(self) -> Any:
        return SimpleNamespace(batch_size=64, params=None)


clock = Clock()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock.now = 1000.0
    monkeypatch.setattr(module, "time", clock)
    settings = SimpleNamespace(checkpoint_interval=INTERVAL, memory_share=0.25)
    attempt: Any = SimpleNamespace(
        settings=settings, resized_for=0, times=Times(), seed=3, directory=None, key="", unshared=""
    )
    training: Any = Training()
    found = Checkpointer(training, attempt)
    found.writer = Writer()
    return SimpleNamespace(it=found, writer=found.writer, training=training, attempt=attempt)


def test_without_a_writer_nothing_is_due_or_written(made: Any) -> None:
    made.it.writer = None
    clock.now += 1e9
    assert made.it.due() is False
    assert (made.it.keeps, made.it.writing, made.it.sharded, made.it.saved) == (False, False, False, None)
    assert made.it.save(ALONE, durable=True) is None
    assert made.it.holds(3) is False


def test_the_first_checkpoint_is_due_early_and_the_next_after_an_interval(made: Any) -> None:
    clock.now += TRIAL_S - 1
    assert not made.it.due()
    clock.now += 1
    assert made.it.due()
    assert not made.it.due(), "asking again does not write a second one"
    clock.now += INTERVAL - 1
    assert not made.it.due()
    clock.now += 1
    assert made.it.due()


def test_a_short_interval_holds_for_the_first_checkpoint_too(made: Any) -> None:
    made.attempt.settings.checkpoint_interval = 5.0
    clock.now += 5.0
    assert made.it.due()


def test_what_a_thread_has_written_is_noted_once_it_is_over(made: Any) -> None:
    noted: list[str] = []
    made.writer.writes, made.writer.written, made.writer.seconds = True, True, 9.0
    made.it.restarts = SimpleNamespace(checkpointed=lambda: noted.append("checkpointed"))
    made.it.due()
    assert (made.it.writing, made.writer.calls, noted, made.it.slowest) == (True, [], [], 0.0)
    made.writer.writes = False
    made.it.due()
    assert (made.it.writing, made.writer.calls, noted) == (False, ["wait"], ["checkpointed"])
    assert made.it.slowest == 9.0
    made.writer.seconds, made.writer.trouble = 2.0, "no space left"
    made.it.due()
    assert made.it.trouble == "no space left"
    assert made.it.slowest == 9.0


@pytest.mark.parametrize(("durable", "slowest"), [(True, 4.0), (False, 0.0)])
def test_a_save_tells_its_seconds_and_puts_the_next_one_off(made: Any, durable: bool, slowest: float) -> None:
    made.it.trouble = made.writer.trouble = "the disk was full"
    clock.now += INTERVAL
    assert made.it.save(ALONE, durable=durable) == 4.0
    meta = {"optimizer_steps": 12, "examples": 384.0, "world_size": 1}
    assert made.writer.calls == [("save", ["model", "optimizer"], 64, meta, 0, durable)]
    # What a thread is to write may fail again.
    assert (made.it.slowest, made.it.trouble) == (slowest, "" if durable else "the disk was full")
    clock.now += TRIAL_S - 1
    assert not made.it.due()


def test_a_save_that_fails_is_told_and_no_error(made: Any) -> None:
    made.writer.fails = CheckpointError("no space left")
    assert made.it.save(ALONE, durable=True) is None
    assert made.it.trouble == "no space left"


def test_a_model_that_is_not_finite_is_not_saved(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    with torch.no_grad():
        made.training.model.weight[0, 0] = float("nan")
    assert made.it.save(ALONE, durable=True) is None
    assert (made.writer.calls, made.it.trouble) == ([], "the model's parameters are not finite")
    assert "no checkpoint is written, there is none" in caplog.text
    made.training.world.rank = 1
    caplog.clear()
    assert made.it.save(ALONE, durable=True) is None
    assert caplog.text == "", "rank 0 says it"


def test_a_receipt_needs_a_durable_checkpoint_and_no_failure(made: Any) -> None:
    assert made.it.receipt(1.5) is None
    made.writer.saved = 12
    assert made.it.receipt(None) is None
    receipt = made.it.receipt(1.5)
    assert (receipt.step, receipt.checkpoint_s, receipt.last_step_at) == (12, 1.5, 50.0)
    assert made.it.report()["checkpointed"] is True


def test_a_report_says_why_no_order_to_move_can_be_followed(made: Any) -> None:
    assert made.it.report()["immovable"] is None
    made.writer.fails = CheckpointError("no checkpoint can be written: the disk is full")
    assert made.it.save(ALONE, durable=True) is None
    assert "disk is full" in made.it.report()["immovable"]
    made.it.due()
    assert "disk is full" in made.it.report()["immovable"], "until a save has gone well"
    made.writer.fails = None
    assert made.it.save(ALONE, durable=True) is not None
    assert made.it.report()["immovable"] is None
    made.it.writer = None
    assert made.it.report()["immovable"]


def test_whether_a_step_is_held_is_known_after_what_is_being_written(made: Any) -> None:
    made.writer.saved = 12
    assert made.it.holds(12)
    assert not made.it.holds(11)
    assert made.writer.calls == ["wait", "wait"]


def test_a_joiner_takes_over_all_that_rank_0_has(made: Any) -> None:
    torch.manual_seed(5)
    there = rng_state(CPU)
    expected = torch.rand(3)
    torch.manual_seed(6)
    twin = Training()
    state = {name: part.state_dict() for name, part in twin.parts().items()}
    state |= {"progress": {"optimizer_steps": 40}, "rng": [there], "params": None, "batch_size": 512}
    made.it.take_over(state | {"loader": {"position": 99}})
    assert torch.equal(made.training.model.weight, twin.model.weight)
    assert made.training.data.loaded == {"position": 99}
    assert (made.it.last_attempt.batch_size, made.it.last_attempt.params) == (512, None)
    made.it.begin_training()
    assert torch.equal(torch.rand(3), expected), "the numbers of rank 0's checkpoint"
    torch.manual_seed(6)
    before = torch.get_rng_state()
    made.it.begin_training()
    assert torch.equal(torch.get_rng_state(), before), "a second loop goes on with its own"


def test_a_joiner_is_sent_every_part_and_the_rest(made: Any) -> None:
    state = made.it.state()
    assert torch.equal(state["model"]["weight"], made.training.model.weight)
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.1
    rest = {name: value for name, value in state.items() if name not in ("model", "optimizer")}
    assert rest == {
        "version": module.STATE_VERSION,
        "rng": [],
        "loader": {"position": 7},
        "batch_size": 64,
        "params": None,
        "last_step_at": 50.0,
    }


def test_the_writer_knows_after_the_first_step_how_large_a_copy_is(made: Any) -> None:
    made.it.after_first_step()
    assert made.writer.calls == [("prepare", ["model", "optimizer"], 0)]


# -- random numbers -----------------------------------------------------------------------------------------------


def test_ranks_that_come_in_draw_the_same_numbers_in_every_release() -> None:
    """A restart under a newer agent goes on as the attempt before."""
    training_state.restore_rng([], rank=3, seed=7, step=40, device=CPU)
    assert torch.initial_seed() == 4_994_596_111_503_404_414
    assert np.random.randint(1 << 31) == 548_098_074
    assert random.getrandbits(32) == 2_585_846_590


def test_no_two_ranks_draw_alike_and_seeds_have_63_bits() -> None:
    seeds, theirs, own = set[int](), set[float](), set[float]()
    for rank in range(1, 33):
        torch.manual_seed(5)
        tell_ranks_apart(rank, seed=-1)
        seeds.add(torch.initial_seed())
        theirs.add(float(np.random.rand()))
        own.add(random.random())
    assert len(seeds) == len(theirs) == len(own) == 32
    assert 1 << 62 <= max(seeds) < 1 << 63


@pytest.mark.parametrize(
    ("device", "saved", "wanted"),
    [("cpu", "cpu", []), ("cpu", "cuda", []), ("cuda", "cpu", []), ("cuda", "cuda", [7])],
)
def test_a_gpu_s_random_numbers_are_for_a_rank_with_a_gpu(
    device: str, saved: str, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint may move between ranks with and without a GPU."""
    put: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: put.append(int(state[0])))
    state = rng_state(CPU) | ({"cuda": torch.tensor([7])} if saved == "cuda" else {})
    set_rng_state(state, torch.device(device))
    assert put == wanted


def test_what_the_next_attempt_would_not_see_is_promised_to_nobody(made: Any) -> None:
    made.writer.saved = 12
    assert made.it.receipt(0.5) is not None
    assert made.it.report()["checkpointed"]
    made.attempt.unshared = "/tmp is this job's own"
    assert made.it.receipt(0.5) is None
    assert made.it.trouble == "the next attempt would not see the checkpoints: /tmp is this job's own"
    assert not made.it.report()["checkpointed"]
