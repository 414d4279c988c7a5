"""Lives of a random cluster, each from one seed: what no plan, refusal, agent or fault may cost."""

from __future__ import annotations

import pytest

from .lives import lives, play

KEPT = {
    1: "a limit that was lowered unseen: what worked before it says nothing; and a limit on nodes counted as GPUs",
    4: "a hook that refuses sizes: a waiting job tried its large size on node after node beside idle GPUs",
    12: "a limit on nodes is no limit on GPUs: a start on one node does not end it",
    33: "a hook refuses a size whoever uses the nodes, and whether they were drained in between",
}
"""Seeds that broke an invariant, and of what."""


@pytest.mark.parametrize("seed", KEPT)
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
