"""Every panel of the Grafana dashboard, run as the role that Grafana has."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import psycopg2
import pytest

from polluxd.model import Allocation, JobState, Placement, Plan, Step

pytestmark = pytest.mark.slurm

DASHBOARD = json.loads((Path(__file__).parents[3] / "contrib" / "grafana" / "pollux.json").read_text())
N1 = Placement(("n1",), 4)


@pytest.fixture
def busy(store, seen, agent, report, cluster):
    """A cluster in which every panel has something to show."""
    epoch = store.lead()
    now = time.time()
    store.sync_jobs([seen(7), seen(8, state=JobState.PENDING, gpus_per_node_held={})])
    store.record_cycle(
        Plan((Allocation(7, N1, 90.0, 1.25, 128, True, "grows"),), 1.0, 1.1, "counts"),
        mode="enforce",
        durations={"decide_s": 0.1},
        started_at=now,
    )
    move = store.plan_move(7, 0, "requeue", N1, N1, "x", epoch)
    store.advance(move.id, Step.DRAINING, now, epoch=epoch)
    agent(7).acknowledge(move.id, last_step_at=now - 9)
    store.take_in()
    agent(7, attempt=1).publish(report(times={"first_step_at": now - 1}))
    store.advance(move.id, Step.TRAINING, now, epoch=epoch)
    failed = store.plan_move(8, 0, "start", Placement(), N1, "x", epoch)
    store.advance(failed.id, Step.FAILED, now, epoch=epoch)
    return cluster


def as_grafana(sql, cluster):
    sql = sql.replace("${cluster:sqlstring}", f"'{cluster}'")
    sql = re.sub(
        r"\$__timeFilter\(((?:[^()]|\([^()]*(?:\([^()]*\)[^()]*)*\))*)\)",
        r"\1 BETWEEN now() - interval '3 hours' AND now() + interval '1 minute'",
        sql,
    )
    assert "$" not in sql
    return sql


def rows(postgres, sql):
    connection = psycopg2.connect(postgres.read_dsn)
    try:
        with connection.cursor() as cursor:
            cursor.execute(sql)
            return [column.name for column in cursor.description], cursor.fetchall()
    finally:
        connection.close()


@pytest.mark.parametrize("panel", DASHBOARD["panels"], ids=lambda panel: panel["title"])
def test_a_panel_shows_something(busy, postgres, panel):
    for target in panel["targets"]:
        columns, found = rows(postgres, as_grafana(target["rawSql"], busy))
        assert found
        assert any(value is not None for row in found for value in row)
        if target["format"] == "time_series":
            assert columns == ["time", "metric", "value"]
            assert all(isinstance(row[2], int | float) for row in found)


def test_the_clusters_are_offered(busy, postgres):
    (variable,) = [v for v in DASHBOARD["templating"]["list"] if v["name"] == "cluster"]
    assert (busy,) in rows(postgres, variable["query"])[1]


def test_panels_do_not_overlap():
    taken = {}
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert x < 24
                assert taken.setdefault((x, y), panel["id"]) == panel["id"]
