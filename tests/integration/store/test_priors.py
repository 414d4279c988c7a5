"""What earlier runs of the same user measured, by fingerprint.

A smaller run does not replace what a larger run measured.
"""

from __future__ import annotations

import time
from functools import partial

import pytest

from pollux.goodput import BatchLimits, ThroughputParams, accumulation_time, step_time
from pollux.scheduler.publisher import Publisher
from pollux.tuning.knowledge import Introduction
from pollux.tuning.measurements import Configuration
from pollux.tuning.prior import Prior
from pollux.tuning.profile import StepProfile

pytestmark = pytest.mark.slurm

PRINT = "0123456789abcdef"
TRUTH = ThroughputParams(0.05, 0.001, 0.02, 0.003, 0.06, 0.005, 2.0)


@pytest.fixture
def access(postgres, access_for):
    return partial(access_for, postgres)


@pytest.fixture
def ask(agent, store):
    """Ask for the prior of a fingerprint, as a job of a user does.

    polluxd has read all reports before. The answer is None where nothing is known.
    """

    def ask(job_id, *, attempt=0, uid=1000, fingerprint=PRINT, gpu_type=""):
        store.remember_fits()
        return agent(job_id, attempt=attempt, uid=uid).prior(fingerprint, gpu_type)

    return ask


def fitted(report, alpha, gpus, nodes=1):
    body = report(explored_gpus=gpus, explored_nodes=nodes)
    body["params"]["alpha_grad"] = alpha
    return body


def test_a_later_run_learns_what_an_earlier_one_measured(store, ask, agent, report):
    assert ask(7) is None
    agent(7).publish(report(params=None))
    assert ask(8) is None
    agent(7).publish(fitted(report, 0.25, 4))
    known = ask(8)
    assert (known["params"]["alpha_grad"], known["explored_gpus"], known["explored_nodes"]) == (0.25, 4, 1)
    assert set(known["params"]) == {
        *("alpha_grad", "beta_grad", "alpha_local", "beta_local", "alpha_node", "beta_node", "gamma")
    }


def test_another_user_or_another_training_learns_nothing(store, ask, agent, report):
    ask(7)
    agent(7).publish(fitted(report, 0.25, 4))
    assert ask(8, uid=1001) is None
    assert ask(9, fingerprint="f" * 64) is None


def test_a_smaller_run_does_not_take_away_what_a_larger_one_knew(store, ask, agent, report):
    ask(7)
    agent(7).publish(fitted(report, 0.25, 8, 2))
    ask(8)
    agent(8).publish(fitted(report, 0.5, 4, 1))
    assert ask(9)["params"]["alpha_grad"] == 0.25
    agent(8).publish(fitted(report, 0.75, 8, 2))
    assert ask(9)["params"]["alpha_grad"] == 0.75


def test_reports_of_an_attempt_that_never_said_what_it_is_are_not_remembered(store, ask, agent, report):
    ask(7)
    agent(7, attempt=1).publish(fitted(report, 0.25, 4))
    assert ask(8) is None


def test_gpu_types_are_known_apart_and_the_scheduler_sees_them_all(store, ask, agent, report):
    for job_id, kind, alpha in ((7, "a100", 0.25), (8, "v100", 0.75)):
        ask(job_id, gpu_type=kind)
        agent(job_id).publish(fitted(report, alpha, 4) | {"gpu_type": kind})
    assert ask(9, gpu_type="h100") is None
    assert ask(9, gpu_type="v100")["params"]["alpha_grad"] == 0.75
    agent(9).publish(report(gpu_type="v100", params=None, prior_gpus=4, prior_nodes=1))
    seen = store.reports()
    assert {t: p.alpha_grad for t, p in seen[7].params_by_type.items()} == {"a100": 0.25, "v100": 0.75}
    assert {t: p.alpha_grad for t, p in seen[9].params_by_type.items()} == {"a100": 0.25, "v100": 0.75}
    assert (seen[9].gpu_type, seen[9].prior_gpus, seen[9].prior_nodes) == ("v100", 4, 1)


def test_a_report_of_another_type_than_it_was_introduced_with_teaches_nothing(store, ask, agent, report):
    ask(7, gpu_type="a100")
    agent(7).publish(fitted(report, 0.25, 4) | {"gpu_type": "v100"})
    assert ask(8, gpu_type="a100") is None
    assert ask(8, gpu_type="v100") is None


def test_what_was_found_wrong_does_not_stay_however_much_it_had_seen(store, ask, agent, report):
    ask(7)
    agent(7).publish(fitted(report, 5.0, 8, 2))
    ask(8)
    agent(8).publish(
        fitted(report, 1.0, 2) | {"prior_refuted": True, "measured_gpus": 2, "measured_nodes": 1}
    )
    assert (ask(9)["params"]["alpha_grad"], ask(9)["explored_gpus"]) == (1.0, 2)


def test_a_job_id_used_again_takes_over_no_fits_of_the_former_job(store, ask, agent, report, seen):
    store.lead()
    store.sync_jobs([seen(7, restart_count=3)])
    ask(7, attempt=3, gpu_type="a100")
    agent(7, attempt=3).publish(fitted(report, 0.25, 4) | {"gpu_type": "a100"})
    store.remember_fits()
    assert set(store.reports()[7].params_by_type) == {"a100"}
    store.sync_jobs([seen(7, restart_count=0, uid=1001, user="bob")])
    agent(7, uid=1001).publish(report() | {"gpu_type": "t4"})
    assert store.reports()[7].params_by_type == {}
    assert Prior.from_answer(ask(8, gpu_type="a100")) is not None, "what its user knows stays"


def test_the_pair_over_racks_and_the_wait_for_data_are_kept(store, ask, agent, report):
    ask(7)
    body = fitted(report, 0.25, 16, 4) | {"data_wait": 0.25, "search_rank": 0.75}
    body["params"] |= {"alpha_rack": 0.5, "beta_rack": 0.125}
    agent(7).publish(body)
    seen = store.reports()[7]
    assert seen.params is not None
    assert (seen.params.alpha_rack, seen.params.beta_rack) == (0.5, 0.125)
    assert (seen.data_wait, seen.search_rank) == (0.25, 0.75)
    prior = Prior.from_answer(ask(8))
    assert prior is not None
    assert (prior.params.alpha_rack, prior.gpus, prior.nodes) == (0.5, 16, 4)


def test_a_training_is_begun_with_what_the_one_before_has_measured(store, access, report):
    """A training begins with the measurements of the one before it.

    The agent's own publisher and profile are at both ends, with a role of least privilege between them.
    """

    def run(job_id, measured):
        profile = StepProfile("a100")
        for nodes, gpus, m in measured:
            key = Configuration(nodes, gpus, m)
            for _ in range(8):
                profile.add(key, local=[float(accumulation_time(TRUTH, m))])
                profile.add(key, final=[float(step_time(TRUTH, nodes, gpus, m))])

        def learn(answer):
            prior = Prior.from_answer(answer)
            if prior is not None:
                profile.learn(prior)

        def collect():
            fit = profile.fit()
            params = None if fit is None else {k: v for k, v in fit._asdict().items() if v is not None}
            gpus, nodes = profile.measured()
            prior = profile.prior
            return report(
                params=params,
                explored_gpus=gpus,
                explored_nodes=nodes,
                gpu_type="a100",
                prior_gpus=prior.gpus if prior else 0,
                prior_nodes=prior.nodes if prior else 0,
            )

        publisher = Publisher(
            access(job_id),
            collect,
            lambda move: None,
            lambda terms: None,
            introduction=Introduction("ab" * 16, "a100", learn),
        )
        publisher.start()
        deadline = time.monotonic() + 60
        while job_id not in store.reports() and time.monotonic() < deadline:
            time.sleep(0.05)
        publisher.close(timeout_s=60)
        return store.reports()[job_id]

    places = [(1, 1, 32), (1, 1, 64), (1, 2, 32), (1, 4, 64), (2, 8, 32), (2, 8, 64), (2, 4, 64)]
    first = run(7, places)
    assert (first.prior_gpus, first.explored_gpus) == (0, 8)
    store.remember_fits()
    second = run(8, [])
    assert (second.prior_gpus, second.prior_nodes, second.explored_gpus) == (8, 2, 0)
    assert second.params is not None
    limits = BatchLimits(32, 1024, 8, 256)
    assert limits == second.limits
    for nodes, gpus, m in ((1, 4, 32), (2, 6, 48)):
        assert float(step_time(second.params, nodes, gpus, m)) == pytest.approx(
            float(step_time(TRUTH, nodes, gpus, m)), rel=0.1
        )


def test_what_is_old_or_too_much_is_forgotten(store, ask, agent, report, postgres, cluster):
    for job_id, fingerprint in ((7, PRINT), (8, "f" * 16)):
        ask(job_id, fingerprint=fingerprint)
        agent(job_id).publish(fitted(report, 0.25, 4))
    store.remember_fits()
    postgres.execute(
        f"DELETE FROM pollux.report_history WHERE cluster = '{cluster}';"
        f"UPDATE pollux.prior SET at = now() - interval '2 y' WHERE cluster = '{cluster}' AND job_id = 8;"
        "INSERT INTO pollux.prior SELECT cluster, uid, lpad(to_hex(n), 16, '0'), gpu_type, 9, at - n * interval '1 s',"
        " params, 1, 1 FROM pollux.prior, generate_series(1, 1200) n"
        f" WHERE cluster = '{cluster}' AND job_id = 7"
    )
    store.prune(time.time(), history_s=1e6, snapshots_s=1e6, jobs_s=1e6)
    assert ask(9, fingerprint="f" * 16) is None
    assert ask(9)["explored_gpus"] == 4
    assert ask(9, fingerprint=f"{999:016x}") is not None
    assert ask(9, fingerprint=f"{1000:016x}") is None
