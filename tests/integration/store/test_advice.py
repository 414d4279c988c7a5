"""An agent's mode and advice, as shown in the job's latest report."""

from __future__ import annotations

import psycopg2
import pytest
from pydantic import ValidationError

pytestmark = pytest.mark.slurm

ADVICE = {"batch_size": 256, "local_batch": 64, "accumulation": 0, "goodput_ratio": 1.25}


def read(postgres, cluster):
    with psycopg2.connect(postgres.url.replace("+psycopg2", "")) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT mode, advice FROM pollux.report WHERE cluster = %s", (cluster,))
        return cursor.fetchone()


def test_mode_and_advice_are_kept_and_go_again(store, agent, seen, report, postgres, cluster):
    store.sync_jobs([seen(7)])
    agent(7).publish(report())
    assert read(postgres, cluster) == (None, None), "an agent of an earlier version"
    agent(7).publish(report(mode="advise", advice=ADVICE))
    assert read(postgres, cluster) == ("advise", ADVICE)
    (row,) = store.jobs_view()
    assert (row.mode, row.advice) == ("advise", ADVICE)
    agent(7).publish(report(mode="enforce", advice=None))
    assert read(postgres, cluster) == ("enforce", None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "watch"},
        {"mode": "advise", "advice": "double it"},
        {"mode": "advise", "advice": ADVICE | {"batch_size": 0}},
        {"mode": "advise", "advice": ADVICE | {"goodput_ratio": None}},
    ],
)
def test_what_makes_no_sense_is_refused(store, agent, report, postgres, cluster, wrong):
    agent(7).publish(report(mode="observe"))
    with pytest.raises(ValidationError):
        agent(7).publish(report(**wrong))
    assert read(postgres, cluster) == ("observe", None)
