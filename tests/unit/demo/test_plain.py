"""The sizes of the plain-Slurm comparison follow the paper's rule only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from contrib.demo.comparison import sizes_under_plain_slurm
from contrib.demo.measure import Recording
from contrib.demo.plain import RULE, VALID, linear_fractions, plain_arms, shapes, tuned_size, tuned_sizes
from contrib.demo.run import RunFailedError
from contrib.demo.summary import Summary
from contrib.demo.workload import Workload, load
from tests.unit.demo.trainings import training

COMPARED = Path(__file__).parents[3] / "contrib" / "demo" / "compare.toml"
WORK = Workload(nodes=4, gpus_per_node=4, limit_s=300.0)


def test_users_may_ask_for_part_of_a_node_or_for_whole_ones():
    assert list(shapes(WORK)) == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("phi", [100.0, 1000.0])
def test_the_chosen_count_keeps_half_to_four_fifths_of_linear_scaling(phi):
    job = training()
    size = tuned_size(job, phi, WORK)
    fraction = linear_fractions(job, phi, WORK)[size.nodes, size.gpus_per_node]
    assert VALID[0] <= fraction <= VALID[1]


def test_a_noisier_gradient_earns_more_gpus_and_a_larger_batch():
    quiet, noisy = tuned_size(training(), 50.0, WORK), tuned_size(training(), 5000.0, WORK)
    assert quiet.gpus < noisy.gpus
    assert quiet.batch_size < noisy.batch_size


def test_a_larger_batch_trains_longer_at_a_higher_rate():
    size = tuned_size(training(), 200.0, WORK)
    assert size.batch_size > 64
    scale = size.batch_size / 64
    assert size.epochs == pytest.approx(10.0 * (200 + size.batch_size) / (200 + 64))
    assert 0.1 < size.lr < 0.1 * scale
    # AdaScale: steps of M0 examples that one step is worth, so epochs x gain = epochs0 x scale.
    assert size.epochs * size.lr / 0.1 == pytest.approx(10.0 * scale)


def test_a_job_that_is_not_adaptive_keeps_batch_size_epochs_and_rate():
    size = tuned_size(training(adaptive=False), None, WORK)
    assert (size.batch_size, size.epochs, size.lr) == (64, 10.0, 0.1)


def test_limits_on_gpus_hold():
    assert tuned_size(training(max_gpus=2), 5000.0, WORK).gpus <= 2
    assert tuned_size(training(min_gpus=8), 50.0, WORK).gpus >= 8


def test_an_unmeasured_noise_scale_is_an_error_not_a_guess():
    work = Workload(4, 4, 300.0, (training(),))
    with pytest.raises(KeyError):
        tuned_sizes(work, {})


def test_the_noise_scales_of_the_pollux_run_size_the_plain_jobs():
    work = replace(WORK, trainings=(training(), training(name="held", adaptive=False)))
    run = Summary(Recording(), WORK.gpus, {}, {}, noise_scale={"t": 100.0})
    assert sizes_under_plain_slurm(work, run)[RULE] == tuned_sizes(work, {"t": 100.0})
    with pytest.raises(RunFailedError, match="reported by t: cannot tune"):
        sizes_under_plain_slurm(work, replace(run, noise_scale={}))


def test_users_size_their_jobs_in_four_ways():
    work = replace(WORK, trainings=(training(min_gpus=2), training(name="small", max_gpus=3)))
    arms = plain_arms(work, {"t": 300.0, "small": 300.0})
    assert list(arms) == [RULE, "one node each", "min-gpus each", "the best static sizes"]
    assert [size.gpus for size in arms["one node each"].values()] == [4, 3]
    assert [size.gpus for size in arms["min-gpus each"].values()] == [2, 1]


def test_each_training_of_the_comparison_has_its_way_in_every_arm():
    work = load(COMPARED)
    assert len(work.trainings) >= 12
    assert 500 <= max(job.arrive_s for job in work.trainings) <= 600
    for sizes in plain_arms(work, {job.name: 80.0 for job in work.trainings}).values():
        for job in work.trainings:
            assert job.min_gpus <= sizes[job.name].gpus <= (job.max_gpus or 16)
