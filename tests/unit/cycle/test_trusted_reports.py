"""What polluxd believes of a report, by its own records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pollux.goodput import BatchLimits, Goodput, NoiseScale, ThroughputParams, efficiency
from pollux.learning_rate.progress import Progress
from polluxd.cycle.trusted_reports import Held, TrustedReports, fit_of
from polluxd.model import Report

LIMITS = BatchLimits(128, 128, 8, 128)
TRUTH = ThroughputParams(0.0, 0.005, 0.1, 0.02, 0.2, 0.03, 1.0)
PERFECT = ThroughputParams(0.0, 0.005, 0.0, 0.0, 0.0, 0.0, 1.0)


def rate(gpus, nodes=1, params=TRUTH):
    """Scale-invariant steps per second."""
    return float(Goodput(params, None, LIMITS, True).optimize(nodes, gpus).goodput) / LIMITS.initial


class Job:
    """One job that trains truly and reports what it likes."""

    def __init__(self, **claims):
        self.trusted, self.claims = TrustedReports(), claims
        self.now, self.progress, self.most, self.attempt = 1e6, 0.0, (0, 0), 0

    def train(self, gpus, nodes=1, minutes=7, *, speed=None, restarts=True, gpu_type="", adaptive=True):
        self.most = (max(self.most[0], gpus), max(self.most[1], nodes))
        self.attempt += restarts
        for _ in range(minutes):
            self.now += 60
            self.progress += 60 * (rate(gpus, nodes) if speed is None else speed)
            report = Report(
                **{"attempt": self.attempt, "at": self.now, "limits": LIMITS, "params": TRUTH, "noise": None},
                **{"explored_gpus": self.most[0], "explored_nodes": self.most[1], "progress": self.progress},
                **{"target": 1e6, "first_step_at": self.now - 30, "goodput": rate(gpus, nodes) * 128},
            )
            told = replace(report, **{k: v(report) if callable(v) else v for k, v in self.claims.items()})
            held = {7: Held(gpus, nodes, *self.most, gpu_type=gpu_type, adaptive=adaptive)}
            judged = self.trusted.trust({7: told}, held, self.now)
        self.unconfirmed = judged.unconfirmed.get(7, ())
        return judged.reports[7], judged.doubts.get(7, ())


def test_an_honest_job_is_believed():
    job = Job()
    for gpus, nodes in ((1, 1), (2, 1), (4, 1), (8, 2), (2, 1)):
        kept, doubts = job.train(gpus, nodes)
        assert doubts == job.unconfirmed == ()
        assert (kept.params, kept.explored_gpus, kept.target) == (TRUTH, job.most[0], 1e6)


def test_explored_gpus_are_polluxds_own_record():
    kept, doubts = Job(explored_gpus=10**6, explored_nodes=10**6).train(2)
    assert (kept.explored_gpus, kept.explored_nodes) == (2, 1)
    assert "explored_gpus=1000000: the job has held 2 at most" in doubts


def test_a_curve_that_its_progress_contradicts_is_replaced_by_what_was_observed():
    job = Job(params=PERFECT)
    kept, doubts = job.train(1)
    assert doubts == (), "one size contradicts no curve"
    kept, doubts = job.train(4)
    assert doubts == (), "a training that has become slower looks the same"
    assert "times as fast" in job.unconfirmed[0]
    function = Goodput(kept.params, None, LIMITS, True)
    seen = float(function.optimize(1, 4).goodput) / float(function.optimize(1, 1).goodput)
    assert seen == pytest.approx(rate(4) / rate(1), rel=0.05)


def test_a_single_slow_rate_of_a_size_that_the_job_has_left_keeps_it_from_no_gpus():
    """A node that failed, or a noisy measurement: the job gets no second rate there."""
    job = Job()
    job.train(4)
    kept, _ = job.train(8, 2, minutes=4, speed=0.5 * rate(8, 2))
    assert kept.most_gpus == 8, "until it is seen whether this is so"
    kept, _ = job.train(1)
    assert (kept.most_gpus, kept.params, job.unconfirmed) == (None, TRUTH, ())


def test_a_job_at_a_new_size_gains_nothing_beyond_an_equal_share_until_its_progress_is_seen_there():
    job = Job(prior_gpus=10**6)
    trusted = job.train(4)[0]
    assert trusted.most_gpus is None, "seen at 4 GPUs, it may grow"
    job.now += 30
    fresh = replace(trusted, attempt=job.attempt + 1, at=job.now, explored_gpus=8)
    kept = job.trusted.trust({7: fresh}, {7: Held(8, 2, 8, 2, 4.0)}, job.now).reports
    assert (kept[7].most_gpus, kept[7].explored_gpus) == (8, 8), "measured, by its own account"
    alone = job.trusted.trust({7: fresh}, {7: Held(8, 2, 8, 2)}, job.now).reports
    assert alone[7].most_gpus is None, "there is no other user"
    assert job.train(8, 2)[0].most_gpus is None


def test_progress_beyond_the_number_of_gpus_is_none():
    job = Job(params=PERFECT)
    job.train(1)
    job.train(2, speed=10 * rate(1))
    assert "beyond the number of GPUs" in job.unconfirmed[0]


def test_a_job_without_progress_gains_no_gpus():
    job = Job()
    job.train(4)
    kept, doubts = job.train(4, minutes=6, speed=0.0)
    assert doubts == (), "an evaluation is no lie"
    assert "no progress" in job.unconfirmed[0]
    assert kept.most_gpus == 4
    job.train(4)
    assert job.unconfirmed == ()


def test_a_job_that_has_shown_no_size_gains_no_more_than_an_equal_share():
    def most(gpus: int, share: float) -> int | None:
        job = Job()
        report = Report(1, 60.0, LIMITS, params=PERFECT, explored_gpus=99, prior_gpus=99, first_step_at=30.0)
        kept = job.trusted.trust({7: report}, {7: Held(gpus, 1, 99, 9, share)}, 60.0).reports
        return kept[7].most_gpus

    assert most(1, 8.0) == 8
    assert most(12, 8.0) == 12, "what it holds stays"
    assert most(1, 7.5) == 8


def test_a_fit_that_is_not_believed_takes_the_remaining_work_with_it():
    job = Job(params=PERFECT, target=1e5)
    assert job.train(1)[0].target == 1e5
    kept, _ = job.train(4)
    assert (kept.target, kept.params == PERFECT) == (None, False)


def test_a_job_that_should_have_ended_has_no_remaining_work():
    job = Job(target=lambda report: 1000.0, progress=lambda report: min(report.progress, 999.9))
    kept, _ = job.train(1, minutes=3)
    assert kept.target == 1000.0
    kept, doubts = job.train(1, minutes=30, restarts=False)
    assert (kept.target, doubts) == (None, ())
    assert "it should have ended" in job.unconfirmed[-1]
    job.claims = {}
    assert job.train(1)[0].target == 1e6, "its user has added epochs"


def test_a_training_that_goes_on_beyond_its_target_has_no_known_length_and_is_no_lie():
    kept, doubts = Job(target=10.0).train(1, minutes=30)
    assert (kept.target, doubts) == (None, ())


def test_a_target_that_moves_with_the_worth_of_a_sample_is_believed():
    """The agent's own reckoning of `job.epochs`: noise scales rise and fall, and so do batch sizes."""
    progress = Progress(initial=128, passes=3000.0)
    limits, trusted, now = BatchLimits(128, 4096, 16, 1024), TrustedReports(), 0.0
    for gpus, batch, noise_scale in (
        (4, 1024, 1000),
        (4, 1024, 2000),
        (1, 128, 2000),
        (4, 4096, 500),
        (4, 1024, 9000),
    ):
        noise = NoiseScale(1.0, noise_scale / 128)
        worth = float(efficiency(noise, 128, batch))
        for _ in range(20):
            now += 30.0
            progress.advance(batch * 100 * gpus, worth)
            progress.epoch, position = divmod(progress.samples, 50_000)
            progress.pass_from = progress.epoch
            report = Report(
                **{
                    "attempt": 1,
                    "at": now,
                    "limits": limits,
                    "params": TRUTH,
                    "noise": noise,
                    "gpus": gpus,
                    "nodes": 1,
                },
                **{"explored_gpus": 4, "explored_nodes": 1, "batch_size": batch, "progress": progress.steps},
                **{
                    "target": progress.target_steps(50_000, progress.epoch, position, worth),
                    "first_step_at": 1.0,
                },
            )
            judged = trusted.trust({7: report}, {7: Held(gpus, 1, 4, 1)}, now)
            assert not [doubt for doubt in judged.doubts.get(7, ()) if "remaining work" in doubt]
            assert judged.reports[7].target == report.target


@pytest.mark.parametrize("worths", [[1.0], [1 / 32], [1 / 32, 1.0], [1.0, 1 / 32, 0.5]])
def test_a_job_that_is_always_about_to_end_is_found_out_whatever_worth_it_claims(worths):
    limits, trusted, doubts = BatchLimits(128, 4096, 16, 1024), TrustedReports(), {}
    for minute in range(60):
        worth = worths[minute % len(worths)]
        batch = round(128 / worth)
        report = Report(
            **{
                "attempt": 1,
                "at": 60.0 * minute,
                "limits": limits,
                "noise": NoiseScale(1.0, 0.0),
                "batch_size": batch,
            },
            **{"progress": 100.0 * minute, "target": 100.0 * minute + 5.0, "first_step_at": 1.0},
        )
        doubts = trusted.trust({7: report}, {7: Held(4, 1, 4, 1)}, report.at).doubts
    assert "its target has grown" in doubts[7][-1]


def test_epochs_that_the_user_adds_and_another_m0_are_no_lie():
    job = Job(target=2000.0)
    job.train(1, minutes=20)
    job.claims = {"target": 4000.0}
    kept, doubts = job.train(1)
    assert (kept.target, doubts) == (4000.0, ())
    half = BatchLimits(64, 128, 8, 128)
    job.claims = {"target": 8000.0, "limits": half, "progress": lambda report: 2 * report.progress}
    kept, doubts = job.train(1)
    assert (kept.target, doubts) == (8000.0, ())


def test_a_target_that_moves_away_is_no_target():
    kept, doubts = Job(target=lambda report: report.progress + 1.0).train(1, minutes=3)
    assert kept.target is None
    assert "its target has grown" in doubts[-1]


def test_a_fit_of_rates_goes_through_them():
    rates = {(g, 1): rate(g) for g in (1, 2, 4)}
    fit = fit_of(rates, Report(0, 0.0, LIMITS))
    assert rate(1, params=fit) == pytest.approx(rate(1), rel=0.01)
    assert rate(4, params=fit) < 1.5 * rate(4)


def test_jobs_that_are_gone_are_forgotten():
    job = Job()
    job.train(2)
    assert job.trusted.seen(7)
    job.trusted.trust({}, {}, job.now)
    assert not job.trusted.seen(7)


@pytest.mark.parametrize(
    "stages",
    [
        # Early on many GPUs at a small noise scale, late on few at a large one.
        [(16, 4, 0.3, 0.3), (4, 1, 30.0, 30.0), (16, 4, 30.0, 30.0), (1, 1, 30.0, 30.0)],
        # Measured too large on many GPUs, and too small on few.
        [(16, 4, 10.0, 40.0), (4, 1, 10.0, 5.0), (16, 4, 10.0, 40.0), (4, 1, 10.0, 5.0)],
    ],
)
def test_a_job_whose_noise_scale_grows_or_is_measured_wrong_is_believed(stages):
    trusted, limits, now, progress, most = TrustedReports(), BatchLimits(128, 4096, 8, 128), 0.0, 0.0, (0, 0)
    truth = ThroughputParams(0.02, 0.005, 0.02, 0.002, 0.04, 0.003, 1.0)
    for attempt, (gpus, nodes, true, measured) in enumerate(stages):
        most = (max(most[0], gpus), max(most[1], nodes))
        noise = NoiseScale(1.0, measured)
        local, passes, _ = Goodput(truth, noise, limits, True).best(nodes, gpus)
        speed = float(
            Goodput(truth, NoiseScale(1.0, true), limits, True).evaluate(nodes, gpus, local, passes)
        )
        for _ in range(20):
            now += 30
            progress += 30 * speed / limits.initial
            report = Report(
                **{"attempt": attempt, "at": now, "limits": limits, "params": truth, "noise": noise},
                **{"explored_gpus": most[0], "explored_nodes": most[1], "progress": progress},
                **{"batch_size": gpus * local * (passes + 1), "target": 1e6, "first_step_at": 1.0},
            )
            kept, doubts, unconfirmed = trusted.trust({7: report}, {7: Held(gpus, nodes, *most)}, now)
            assert (doubts, unconfirmed) == ({}, {})
            assert kept[7] == report


def test_a_job_of_fixed_batch_size_is_believed_whatever_its_noise_scale():
    job = Job(noise=NoiseScale(1e-9, 1e9), limits=BatchLimits(128, 4096, 8, 128))
    for gpus in (1, 4, 8):
        assert job.train(gpus, adaptive=False)[1] == job.unconfirmed == ()


@pytest.mark.parametrize("course", [[(1.0, 2), (0.0, 1)] * 3, [(1.0, 5), (0.4, 3), (1.0, 5)] * 2])
def test_evaluations_and_slow_rates_among_good_ones_raise_no_doubt(course):
    job = Job()
    job.train(1)
    for speed, minutes in course:
        kept, _ = job.train(4, minutes=minutes, speed=speed * rate(4), restarts=False)
        assert kept.params == TRUTH


@pytest.mark.parametrize(("speed", "contradicted"), [(1.0, False), (0.6, True)])
def test_one_slow_rate_stops_growth_and_two_further_ones_replace_the_fit(speed, contradicted):
    job = Job()
    job.train(1)
    # Pauses that lie between every two reports slow a job as evenly as a false curve does.
    kept, _ = job.train(4, minutes=3, speed=0.6 * rate(4))
    assert (kept.most_gpus, job.unconfirmed) == (4, ())
    kept, _ = job.train(4, minutes=4, speed=speed * rate(4), restarts=False)
    assert (bool(job.unconfirmed), kept.most_gpus) == (contradicted, None)
    assert (kept.params != TRUTH) is contradicted


def test_a_job_is_faster_on_those_types_alone_on_which_it_trained_if_only_for_a_minute():
    fits = {k: TRUTH._replace(beta_grad=s) for k, s in (("a100", 0.005), ("h100", 0.002), ("t4", 0.01))}
    job = Job(params_by_type=fits, gpu_type="h100")
    kept, _ = job.train(4, minutes=1, gpu_type="a100")
    assert (kept.gpu_type, set(kept.params_by_type)) == ("a100", {"a100", "t4"})
    kept, _ = job.train(4, minutes=1, gpu_type="h100")
    assert (kept.gpu_type, dict(kept.params_by_type)) == ("h100", fits)


def test_a_false_ratio_of_gpu_types_is_not_believed():
    slow = TRUTH._replace(beta_grad=10 * TRUTH.beta_grad)
    job = Job(params=TRUTH, params_by_type=lambda report: {"a100": TRUTH, "t4": slow})
    job.train(4, gpu_type="a100")
    kept, _ = job.train(4, gpu_type="t4", speed=rate(4) / 2)
    assert "GPU types a100 and t4" in job.unconfirmed[0]
    assert kept.params_by_type == {}


def test_a_job_that_did_not_give_up_gpus_gains_none_beyond_an_equal_share():
    trusted = TrustedReports()
    report = Report(1, 60.0, LIMITS, params=TRUTH, explored_gpus=16, explored_nodes=4, first_step_at=30.0)
    held = Held(16, 4, 16, 4, 8.0, undrained=2)
    kept, doubts, _ = trusted.trust({7: report}, {7: held}, 60.0)
    assert kept[7].most_gpus == 8
    assert "did not give up GPUs, 2 times" in doubts[7][0]
    assert trusted.trust({7: report}, {7: replace(held, equal_share=None)}, 60.0).doubts == {}


def test_epochs_that_a_user_adds_are_believed_though_a_larger_batch_makes_each_sample_worth_less():
    limits, noise, trusted = BatchLimits(128, 4096, 16, 1024), NoiseScale(1.0, 1.0), TrustedReports()
    judged = None
    for attempt, batch, samples in ((0, 128, 1000.0), (1, 1024, 1500.0), (1, 128, 1490.0)):
        worth = float(efficiency(noise, 128, batch))
        told = Report(
            **{"attempt": attempt, "at": 60.0 + samples, "limits": limits, "params": TRUTH, "noise": noise},
            **{"batch_size": batch, "progress": 10.0, "target": 10.0 + samples * worth, "first_step_at": 1.0},
        )
        judged = trusted.trust({7: told}, {7: Held(1, 1, 1, 1)}, told.at)
    assert judged is not None
    assert judged.doubts == {}
    assert judged.reports[7].target == 1500.0
