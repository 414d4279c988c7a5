"""Lives of a random cluster, each from one seed: what no plan, refusal, agent or fault may cost."""

from __future__ import annotations

import pytest

from .lives import lives, play

KEPT: dict[int, str] = {}
"""Seeds that broke an invariant, and of what. Those of before an event was added are unit tests in test_refusals.py."""


@pytest.mark.parametrize("seed", [1, 2, 3, *KEPT])
def test_a_life_that_broke_an_invariant_breaks_none_any_more(seed: int) -> None:
    play(seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_lives() -> None:
    done = lives(10_000, 100)
    assert not done.failed, done.failed
    assert done.stops > 10, "Slurm refused moves whose training had stopped"
    assert done.calm_lost_gpu_s < 0.005 * done.calm_gpu_s


def test_a_seed_says_all() -> None:
    one, two = play(7), play(7)
    assert one.history == two.history
    assert one.world.rows.moves == two.world.rows.moves
