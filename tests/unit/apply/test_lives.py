"""Lives of a random cluster, each from one seed: what no plan, refusal, agent or fault may cost."""

from __future__ import annotations

import pytest

from .lives import lives, play

KEPT = {
    3: "without the way back of a refused training",
    4: "where the target of a refused update still counts as taken, and bars the way back",
    15: "where a training that a limit has stopped tries smaller sizes",
    10_058: "where a waiting job is tried again at the size that was refused",
    10_059: "where a job counts as one that worked beside a training that had left before",
    10_321: "where a start ends a refusal at a larger size",
    200_609: "that forgets what a training under way was refused, or counts it at nothing while it waits",
    301_468: "where a waiting job whose moves have cost more than its age, as a stepped clock says, starts no more",
    301_918: "where a refusal of nodes is forgotten while the training that it stopped is on its way back",
    1_000_025: "the same, after a shrink",
    1_000_058: "where a trainer of its own loop is started below the size that its user asked for",
    1_000_066: "where a job waits although Slurm would start it as it was submitted",
    2_000_585: "where a training that several nodes refused is tried on one of them",
    2_100_142: "where a waiting job is tried again on the node that refused it, beside another",
    2_200_227: "where a job that has run waits although Slurm would start it as it was submitted",
    3_000_078: "where a job is left to Slurm at a size that its user never asked for",
    3_000_630: "where a job whose starts have taken longer than an hour starts no more",
    3_000_542: "where a trainer that fails on fewer GPUs is tried again on fewer alone",
    3_001_161: "where a limit on minutes refuses one job again and again, and keeps others out",
    3_001_300: "where a job that is tried again takes what a training has left of a limit for some seconds",
    3_002_324: "where a growth in place counts as a start on all of its nodes together",
    3_004_631: "where a limit has a trainer of its own loop started below the size of its user, where it fails",
    3_006_481: "where a waiting job takes what a training in mid-move was to have of a limit",
    3_202_231: "where a training gives way each minute for a job that Slurm refuses again",
    40_052: "where an older refusal of the limit keeps a training from its way back",
}
"""Seeds of lives that break an invariant in a polluxd as described."""


@pytest.mark.parametrize("seed", KEPT)
def test_a_life_that_tells_a_broken_polluxd_breaks_no_invariant(seed: int) -> None:
    play(seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_lives() -> None:
    done = lives(10_000, 200)
    assert not done.failed, done.failed
    assert done.stops > 5, "Slurm refused moves whose training had stopped"
    assert done.lost < 0.001, done.costs


def test_a_seed_says_all() -> None:
    one, two = play(7), play(7)
    assert one.history == two.history
    assert one.world.rows.moves == two.world.rows.moves
