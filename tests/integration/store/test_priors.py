"""Knowledge across runs: the same user's, by fingerprint, and never less than was known."""

from __future__ import annotations

import time

import psycopg2
import pytest

from pollux.database import fetch_prior
from pollux.ticket import Ticket

pytestmark = pytest.mark.slurm

PRINT = "0123456789abcdef"


@pytest.fixture
def ask(postgres, cluster, sign):
    """What a job of a user hears of a fingerprint."""

    def ask(job_id, *, attempt=0, uid=1000, fingerprint=PRINT):
        ticket = Ticket(
            cluster, job_id, attempt, uid, sign(cluster, job_id, attempt, uid), postgres.agent_dsn
        )
        return fetch_prior(ticket, fingerprint)

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


@pytest.mark.parametrize("fingerprint", ["", "short", "g" * 16, "A" * 16, "a" * 65, "a" * 16 + "\n"])
def test_a_fingerprint_is_hexadecimal(store, ask, agent, fingerprint):
    job = agent(7)
    with pytest.raises(psycopg2.Error) as caught:
        job.sql("SELECT pollux.prior_v1(%s, %s, %s, %s, %s, %s)", *job.credentials, fingerprint)
    assert caught.value.pgcode == "PX422"
    assert ask(7, fingerprint=fingerprint) is None


def test_a_forged_token_learns_nothing(store, agent, cluster, sign):
    job = agent(8, by=sign(cluster, 7, 0, 1000))
    with pytest.raises(psycopg2.Error) as caught:
        job.sql("SELECT pollux.prior_v1(%s, %s, %s, %s, %s, %s)", *job.credentials, PRINT)
    assert caught.value.pgcode == "PX401"


def test_what_is_old_or_too_much_is_forgotten(store, ask, agent, report, postgres, cluster):
    for job_id, fingerprint in ((7, PRINT), (8, "f" * 16)):
        ask(job_id, fingerprint=fingerprint)
        agent(job_id).publish(fitted(report, 0.25, 4))
    postgres.execute(
        f"UPDATE pollux.prior SET at = now() - interval '2 y' WHERE cluster = '{cluster}' AND job_id = 8;"
        "INSERT INTO pollux.prior SELECT cluster, uid, lpad(to_hex(n), 16, '0'), 9, at - n * interval '1 s',"
        " 1, 1, 1, 1, 1, 1, 1, 1, 1 FROM pollux.prior, generate_series(1, 1200) n"
        f" WHERE cluster = '{cluster}' AND job_id = 7"
    )
    store.prune(time.time(), history_s=1e6, snapshots_s=1e6, jobs_s=1e6)
    assert ask(9, fingerprint="f" * 16) is None
    assert ask(9)["explored_gpus"] == 4
    assert ask(9, fingerprint=f"{999:016x}") is not None
    assert ask(9, fingerprint=f"{1000:016x}") is None
