"""What holds for a training by any library: Accelerate, Hugging Face's Trainer, Lightning, JAX.

The libraries are real. A module of each trains by orders that come from outside.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pollux.goodput import BatchChoice
from tests.integration.integrations.orders import EXAMPLES, KILLED, RESIZED, SLURM, Orders, each_once
from tests.unit.agent.launched_step import step

Ranks = Callable[..., list[Any]]
STEPS = -(-EXAMPLES // 16)
"""Of an epoch at M0."""


@pytest.fixture(params=["accelerate", "trainer", "lightning", "jax"])
def library(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(f"tests.integration.integrations.by_{request.param}")


def evaluations(*attempts: dict[str, Any]) -> int | None:
    """Return how many the library has made; None where the script makes them by itself."""
    return sum(each["evaluations"] for each in attempts) if "evaluations" in attempts[0] else None


def test_a_training_moves_between_world_sizes_and_uses_each_example_once_per_pass(
    library: Any, ranks: Ranks, tmp_path: Path
) -> None:
    def body(orders: Orders) -> Any:
        return library.train(tmp_path / "out", tmp_path / "checkpoints", orders)

    env = {"POLLUX_DRAIN_WAIT": "0", **SLURM}
    moved = ranks(2, body, Orders({1: BatchChoice(4, 1), 3: BatchChoice(8, 1)}, drain_at=6), env=env)
    assert all(part["stopped"] for part in moved), "drained: checkpoint, acknowledgement, exit"
    assert {(4, 1), (8, 1)} <= set(moved[0]["sizes"])
    [rest] = ranks(1, body, Orders({9: BatchChoice(5, 2)}), env=env)
    assert (rest["stopped"], rest["finished"]) == (False, True)
    assert (5, 2) in rest["sizes"]
    assert Counter(moved[0]["used"] + moved[1]["used"] + rest["used"]) == dict.fromkeys(range(EXAMPLES), 3)
    assert rest["steps"] > moved[0]["steps"], "the library's own counts go on"
    assert evaluations(moved[0], rest) in (None, 3), "one after each epoch"
    library.assert_logged(rest)
    [again] = ranks(1, body, Orders(), env=env)
    assert (again["used"], again["finished"]) == ([], True), "a finished training trains no more"


@pytest.mark.parametrize("drain_at", [4, 10])
def test_a_drain_after_an_epochs_last_step(library: Any, ranks: Ranks, tmp_path: Path, drain_at: int) -> None:
    def body(drain_at: int | None) -> Any:
        # Obeyed after the step after the next, with which the first epoch ends, or the second and last.
        return library.train(tmp_path, tmp_path / "c", Orders({}, drain_at, killed=True), epochs=2)

    [part], [rest] = ranks(1, body, drain_at), ranks(1, body, None)
    assert part["steps"] == drain_at + 2
    assert part["stopped"] or part["finished"], "the last step may end the training before the drain"
    assert rest["steps"] == 2 * STEPS
    assert evaluations(part, rest) in (None, 2), "one after each epoch"
    assert Counter(part["used"] + rest["used"]) == dict.fromkeys(range(EXAMPLES), 2)


def test_two_ranks_that_accumulate_train_as_one_that_does_not(
    library: Any, ranks: Ranks, tmp_path: Path
) -> None:
    def body(local: int, passes: int) -> Any:
        orders = Orders({0: BatchChoice(local, passes - 1)})
        return library.train(tmp_path, None, orders, epochs=1, exact=True)

    alone, two = ranks(1, body, 16, 1)[0], ranks(2, body, 4, 2)[0]
    assert (4, 1) in two["sizes"]
    assert alone["steps"] == two["steps"] == STEPS
    for one, other in zip(alone["weights"], two["weights"], strict=True):
        assert one == pytest.approx(other, abs=2e-5)


def test_noise_learning_rate_and_schedule_follow_a_larger_batch(
    library: Any, ranks: Ranks, tmp_path: Path
) -> None:
    def body() -> Any:
        return library.train(tmp_path, None, Orders({20: BatchChoice(32, 1)}), epochs=12, adaptive=True)

    [result] = ranks(1, body)
    assert result["noise"] is not None
    assert (32, 1) in result["sizes"]
    assert max(result["factors"]) > 1.0
    assert result["steps"] < 12 * STEPS, "larger steps, so fewer"
    # Examples by M0 at least; and the short step at a pass's end counts whole where no larger one makes up for it.
    assert 12 * EXAMPLES // 16 - 1 <= result["schedule"] <= 12 * STEPS + 2
    assert evaluations(result) in (None, 12)


def test_new_ranks_go_on_where_rank_0_is_killed(library: Any, tmp_path: Path) -> None:
    body = KILLED.replace("WHERE", repr("pass")) + library.LAUNCHED
    with step(tmp_path, 1, body, workers=3, POLLUX_EXCHANGE_INTERVAL="0") as launched:
        assert launched.statuses() == [0], launched.output()
    over = launched.log("over")
    assert [note["size"] for note in over] == [3, 3, 3], launched.output()
    assert over[0]["weights"] == over[1]["weights"] == over[2]["weights"]
    assert {index for note in over for index in note["seen"]} == set(range(101)), "evaluated on all of it"
    assert len(launched.log("started")) == 6
    each_once(launched.log("used"), 2, by="rank")
    assert "restored the copy in memory" in launched.output()


SBATCH = """#!/bin/sh
cat > {folder}/submitted
echo "$@" > {folder}/options
echo 4711
"""


@pytest.mark.slow
@pytest.mark.parametrize(("own", "stay"), [(["n0"], ["n0"]), (["n0", "n1"], ["n0", "c0"])])
def test_a_training_grows_and_shrinks_in_place(
    library: Any, tmp_path: Path, own: list[str], stay: list[str]
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(SBATCH.format(folder=tmp_path))
    sbatch.chmod(0o755)
    body = RESIZED.replace("OWN", repr(own)).replace("STAY", repr(stay)) + library.LAUNCHED
    with step(tmp_path, len(own), body, workers=1) as base:
        base.until((tmp_path / "options").exists)
        file, elsewhere = tmp_path / "checkpoints" / "companion-1.json", tmp_path / "companion"
        elsewhere.mkdir()
        with step(
            elsewhere, 1, "", "--companion", str(file), settings="sibling=60", SLURMD_NODENAME="c0"
        ) as companion:
            assert set(base.statuses()) == {0}, base.output() + companion.output()
            assert companion.statuses() == [0], companion.output()
            output = base.output() + companion.output()
    assert output.count("resized in place") == 2, output
    each_once(base.log("used"), None, by="who")
    over = {note["node"]: note for note in base.log("over")}
    assert [over[node]["size"] for node in stay] == [len(stay)] * len(stay)
    assert len(base.log("started")) == len(own) + 1, "rank 0 lives on"
    assert {index for node in stay for index in over[node]["seen"]} == set(range(101)), (
        "evaluated on all of it"
    )
    assert over["n0"]["main"] == [True] * 3
    for node in stay[1:]:
        assert over[node]["main"][0] is False
        assert over[node]["weights"] == over["n0"]["weights"]
        assert over[node].get("state") == over["n0"].get("state"), "the library's own counts"
    if "counted" in over["n0"]:
        step_, epoch, *agents = over["n0"]["counted"]
        assert [step_, epoch] == agents
