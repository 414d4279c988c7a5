"""Resizes in place on real ranks that talk over gloo.

gloo uses the loopback interface. Tests write the orders and start the joiners by hand.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from pollux.errors import LEFT_STATUS, RankLost
from pollux.loop import job
from pollux.slurm_job.environment import LENT_RANKS
from tests.unit.agent.regression import EXAMPLES
from tests.unit.agent.resizing import PATIENCE, Stage, Training, follow, order, retrace


def assert_same(found: Any, expected: Any, what: str, **tolerance: float) -> None:
    if isinstance(expected, Tensor) and expected.is_floating_point():
        torch.testing.assert_close(found, expected, msg=lambda m: f"{what}: {m}", **tolerance)
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected), what
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key], f"{what}.{key}", **tolerance)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b, what, **tolerance)
    else:
        assert found == pytest.approx(expected, rel=1e-4), what


def assert_each_sample_once(found: dict[str, Any]) -> None:
    """Assert that the ranks used each sample once in each pass."""
    counts = Counter(sample for rank in found.values() for sample in rank["used"])
    passes = max(number for number, _ in counts)
    assert passes >= 2
    assert max(counts.values()) == 1
    assert all((number, i) in counts for number in range(passes) for i in range(EXAMPLES))
    assert sum(counts.values()) == found["n1"]["state"]["samples"]


def restarted(stage: Stage, first: dict[str, Any]) -> dict[str, Any]:
    """The results of a training that restarts from a checkpoint wherever `first` was resized."""
    again = stage.directory / "again"
    steps = [step for step, _ in first["worlds"][1:]] + [first["state"]["steps"]]
    for (_, size), until in zip(first["worlds"], steps, strict=True):
        stage = Stage(again, stage.free_port)
        stage.start([f"n{k}" for k in range(1, size + 1)], retrace, again, until)
        expected = stage.results([])
    return expected


def test_a_training_goes_through_resizes_as_through_restarts(stage: Stage, tmp_path: Path) -> None:
    """Resize 4 -> 2 -> 3 -> 1 -> 2 ranks in living processes.

    The reference is a training that writes a checkpoint and restarts at the same steps.
    """
    orders = [
        order(11, "n1 n2", "shrink"),
        order(12, "n1 n2 n5", "grow"),
        order(13, "n1", "shrink"),
        order(14, "n1 n6", "grow"),
    ]
    stage.start(["n1", "n2", "n3", "n4"], follow, tmp_path, orders, len(orders))
    found = stage.results(["n5", "n6"], follow, tmp_path, orders, len(orders))
    assert {n: r["code"] for n, r in found.items()} == {
        **{"n1": None, "n6": None},
        **dict.fromkeys(["n2", "n3", "n4", "n5"], LEFT_STATUS),
    }
    first = found["n1"]
    sizes = [size for _, size in first["worlds"]]
    assert sizes == [4, 2, 3, 1, 2]
    assert [rank["lent"] for rank in (first, found["n6"])] == ["1", "0"], (
        "the launcher takes a companion's loss as one"
    )

    # Whoever left said so before the scheduler heard of it, and of the newest move it hears what it cost.
    steps = [step for step, _ in first["worlds"][1:]]
    assert first["heard"] == [(11, steps[0]), (13, steps[2])]
    report = first["report"]
    assert (report["resize"], report["resized"], report["gpus"]) == ("in-place", 14, 2)
    assert 0 < report["resize_cost"] < PATIENCE
    assert "resize_refused" not in report
    print(f"pause of the last resize: {report['resize_cost']:.3f} s")

    assert_each_sample_once(found)

    # The same steps by checkpoints and restarts. All ranks hold the same, except for random numbers and statistics,
    # which are each rank's own until the next pass.
    expected = restarted(stage, first)
    for mine, theirs in (("n1", "n1"), ("n6", "n2")):
        assert_same(found[mine]["state"], expected[theirs]["state"], mine, rtol=1e-4, atol=1e-5)
    for part in ("weights", "moments"):
        assert torch.equal(first["state"][part], found["n6"]["state"][part])


def test_a_training_that_began_on_one_rank_goes_through_resizes_as_through_restarts(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resize 1 -> 2 -> 1 -> 3 ranks in place, with a compiled model. The reference trains the plain model."""
    monkeypatch.setattr(job, "may_grow", lambda world, _: world.size == 1 and "GROWS" in os.environ)
    orders = [order(61, "n1 n2", "grow"), order(62, "n1", "shrink"), order(63, "n1 n3 n4", "grow")]
    stage.environment |= {"GROWS": "1", "COMPILED": "1"}
    stage.start(["n1"], follow, tmp_path, orders, len(orders))
    found = stage.results(["n2", "n3", "n4"], follow, tmp_path, orders, len(orders))
    first = found["n1"]
    assert {node: rank["code"] for node, rank in found.items()} == {
        **dict.fromkeys(["n1", "n3", "n4"]),
        "n2": LEFT_STATUS,
    }
    sizes = [size for _, size in first["worlds"]]
    assert sizes == [1, 2, 1, 3]
    assert_each_sample_once(found)
    for part in ("weights", "moments"):
        assert all(torch.equal(first["state"][part], found[node]["state"][part]) for node in ("n3", "n4"))

    expected = restarted(stage, first)
    assert_same(first["state"], expected["n1"]["state"], "n1", rtol=1e-4, atol=1e-5)


class ByHand(Training):
    """Accumulate gradients by hand over three passes per step. The last pass synchronises them."""

    passes = 0

    def step(self, x: Tensor, y: Tensor, ids: Tensor) -> None:
        job = self.job
        if not self.worlds or self.worlds[-1][1] != job.world.size:
            self.worlds.append((job.progress.optimizer_steps, job.world.size))
        self.passes += 1
        last = self.passes % 3 == 0
        with nullcontext() if last else self.model.no_sync():  # type: ignore[operator]
            self.scaler.scale(mse_loss(self.model(x), y) / 3).backward()
        if last:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler.step()


def accumulate(directory: Path, orders: list[dict[str, Any]]) -> dict[str, Any]:
    return follow(directory, orders, len(orders), ByHand(directory))


class Whole(Training):
    """A training whose epochs have one step."""

    batch, per_gpu = EXAMPLES, (1, EXAMPLES)


def follow_whole(directory: Path, orders: list[dict[str, Any]]) -> dict[str, Any]:
    return follow(directory, orders, len(orders), Whole(directory))


def test_epochs_of_one_step_are_resized_between_them(stage: Stage, tmp_path: Path) -> None:
    orders = [order(71, "n1 n2 n3", "grow"), order(72, "n1", "shrink")]
    stage.start(["n1", "n2"], follow_whole, tmp_path, orders)
    found = stage.results(["n3"], follow_whole, tmp_path, orders)
    assert [size for _, size in found["n1"]["worlds"]] == [2, 3, 1]
    assert_each_sample_once(found)


def test_a_rank_that_comes_in_measures_the_users_own_accumulation_when_the_others_do(
    stage: Stage, tmp_path: Path
) -> None:
    """A resize makes all ranks forget how many passes the last step had.

    The number tells ranks what a step is. A joiner does not know it, so the other ranks must not use it either.
    """
    orders = [order(15, "n1 n2 n3", "grow")]
    stage.start(["n1", "n2"], accumulate, tmp_path, orders)
    found = stage.results(["n3"], accumulate, tmp_path, orders)
    assert [size for _, size in found["n1"]["worlds"]] == [2, 3]
    noise = [found[node]["state"]["noise"] for node in ("n1", "n2", "n3")]
    assert noise[0] == noise[1] == noise[2]
    assert noise[0]["samples"] >= 4


# -- what may go wrong ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_cannot_be_done_is_refused_and_the_training_goes_on(stage: Stage, tmp_path: Path) -> None:
    orders = [
        order(19, "n1 n2 n0", "grow"),
        order(20, "n2", "shrink"),
        order(21, "n1 n2 n3", "grow"),
        order(22, "n1 n2 n4", "grow"),
        order(23, "n1 n2 n5", "grow"),
        order(24, "n1 n2 n6", "grow", trouble="nobody comes"),
        order(25, "n1", "shrink", "teleport"),
        order(18, "n1", "shrink", trouble="disk"),
        order(26, "n1 n2 n7", "grow", trouble="sbatch"),
        order(27, "n1 n2", "grow"),
        order(28, "n1 n2 n8", "grow", step="started"),
        {"id": 29, "path": "resize"},
        order(30, "n1", "shrink"),
    ]
    stage.start(["n1", "n2"], follow, tmp_path, orders, 1)
    found = stage.results(["n0", "n3", "n4", "n5"], follow, tmp_path, orders, 1)
    first = found["n1"]
    expected = {
        20: "rank 0's node, n1, is to stay",
        21: "script has ended before its training",
        22: "not every joiner that was ready answers",
        19: "the agent has changed since this job began",
        23: "the model has changed since this job began",
        24: "1 of 1 joiners were not ready after 0 s",
        25: "expected a resize, got teleport",
        26: "not from compute nodes",
        18: "no space left",
        27: "expected the nodes n1, n2 and more",
        28: "started after the companion job was submitted",
        29: "not an order that this agent knows",
    }
    assert first["refused"].keys() == expected.keys()
    for number, why in expected.items():
        assert why in first["refused"][number]
    assert [size for _, size in first["worlds"]] == [2, 1]
    assert first["heard"] == [(30, first["worlds"][1][0])]
    assert (first["report"]["resized"], first["report"]["resize_refused"]["id"]) == (30, 29)
    counts = Counter(sample for node in ("n1", "n2") for sample in found[node]["used"])
    assert max(counts.values()) == 1
    assert sum(counts.values()) == first["state"]["samples"]
    assert found["n5"]["code"] == LEFT_STATUS, "a joiner that is not wanted ends well"
    assert not list(tmp_path.glob("companion-*"))


def lose(directory: Path, orders: list[dict[str, Any]]) -> dict[str, Any]:
    """Lose n2 as it leaves and n3 in its fifth step; return n1's account.

    n2 is to leave and dies. n3 joins and dies.
    """
    node, steps = os.environ["SLURMD_NODENAME"], 0

    def die(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            os._exit(9)

    training = Training(directory)
    if node == "n2":
        training.job.coordinator.groups.leave = lambda *_: os._exit(9)  # type: ignore[method-assign]
    if node == "n3":
        training.optimizer.register_step_pre_hook(die)
    try:
        return follow(directory, orders, 99, training)
    except RankLost as error:
        training.job.coordinator.checkpointer.holds(0)  # the checkpoint under way is written
        return {"lent": os.environ[LENT_RANKS], "error": str(error), "worlds": training.worlds}


def test_a_rank_that_dies_instead_of_leaving_and_a_companion_that_is_lost(
    stage: Stage, tmp_path: Path
) -> None:
    orders = [order(41, "n1", "shrink"), order(42, "n1 n3", "grow")]
    stage.start(["n1", "n2"], lose, tmp_path, orders)
    found = stage.results(["n3"], lose, tmp_path, orders)
    assert (found["n2"], found["n3"]) == ("died", "died")
    assert found["n1"]["lent"] == "1", "the job's own nodes begin again without it"
    assert [size for _, size in found["n1"]["worlds"]] == [2, 1, 2]
    # Nothing is lost but what came after a resize: the last, or the one before where its checkpoint was being written.
    _, first, last = (step for step, _ in found["n1"]["worlds"])
    again = Stage(tmp_path, stage.free_port)
    again.start(["n1"], retrace, tmp_path, last + 2)
    assert again.results([])["n1"]["from"] in (first, last)
