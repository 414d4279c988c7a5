"""Fuzz reports: the gateway refuses them, or polluxd decides on them.

Each text goes the whole way that an agent's report goes: the gateway's model, its statement with its own role, the row,
the checks of polluxd, and a decision.
"""

from __future__ import annotations

import copy
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import psycopg2
import psycopg2.extras
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from contrib.devcluster.postgres import DevPostgres
from polluxd.cycle.trusted_reports import Held, TrustedReports
from polluxd.errors import ReportError
from polluxd.gateway.payloads import ReportMessage
from polluxd.gateway.records import Holder, SentReport
from polluxd.model import JobSpec, Node, Report, Snapshot, SnapshotJob
from polluxd.policy import decide
from polluxd.store import Store, rows
from polluxd.store.gateway_statements import GatewayStore
from tests.fuzz.json_values import json_values
from tests.integration.store.conftest import introduce, payload

CLUSTER, JOB, UID = "fuzz", 7, 1000
SOUND = payload()
Publish = Callable[[str], dict[str, Any] | None]
NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(10**20), 10**20),
    st.sampled_from(
        [0, -0.0, 1, 0.5, 2**31 - 1, 2**31, 2**63, 1e12, 1e15, 1e300, 5e-324, 10**400, time.time() + 100]
    ),
)
VALUES = st.one_of(
    NUMBERS, json_values, st.sampled_from(["in-place", "observe", "a100", "\x1b[2J", "x" * 100])
)


EXTRA = {
    "mode": "observe",
    "resize": "in-place",
    "resized": 3,
    "gpu_type": "a100",
    "data_wait": 0.5,
    "resize_cost": 0.5,
    "search_rank": 0.5,
    "local_max_by_type": {"": 64, "a100": 8},
}
EXTRA |= {"measured_gpus": 4, "measured_nodes": 1, "prior_gpus": 2, "prior_nodes": 1, "prior_refuted": False}
ORDINARY = SOUND | EXTRA
"""Nearly every report: without advice and a refusal."""
EXTRA |= {"advice": {"batch_size": 4, "local_batch": 4, "accumulation": 0, "goodput_ratio": 1.5}}
EXTRA |= {"resize_refused": {"id": 4, "why": "no"}}


PLACES = [(name,) for name in SOUND | EXTRA]
PLACES += [
    (name, inner) for name, value in (SOUND | EXTRA).items() if isinstance(value, dict) for inner in value
]


@st.composite
def changed(draw: st.DrawFn, members: dict[str, Any]) -> dict[str, Any]:
    """The members with up to six values replaced, at every depth, or left out.

    Few changes, so that many reports pass the first checks and reach those behind them.
    """
    report = copy.deepcopy(members)
    for place, value in draw(st.lists(st.tuples(st.sampled_from(PLACES), VALUES), max_size=6)):
        holder = report if len(place) == 1 else report.setdefault(place[0], {})
        if isinstance(holder, dict):
            holder[place[-1]] = value
    for name in draw(st.sets(st.sampled_from(sorted(members)), max_size=1)):
        report.pop(name, None)
    return report


class Gateway:
    """Take a report as the gateway does, and read its row as polluxd does."""

    def __init__(self, postgres: DevPostgres) -> None:
        self._records = GatewayStore(postgres.gateway_url, CLUSTER)
        self._connection = psycopg2.connect(postgres.admin_url.replace("+psycopg2", ""))
        self._connection.autocommit = True

    def publish(self, text: str) -> dict[str, Any] | None:
        """Return the report's row; None where the gateway refuses the text."""
        try:
            message = ReportMessage.model_validate_json(text)
        except ValidationError:
            return None
        (refusal,) = self._records.store_reports([SentReport(Holder(UID, JOB, 0), message.document())])
        if refusal == "too-long":
            return None
        assert refusal is None, "what the model accepts can be stored"
        with self._connection.cursor(cursor_factory=psycopg2.extras.RealDictCursor) as cursor:
            # Deleted at once: a job may send 120 reports a minute.
            cursor.execute("DELETE FROM pollux.report_history r RETURNING *, pg_column_size(r) AS bytes")
            (found,) = cursor.fetchall()
            assert found["bytes"] <= 2048, "the row is bounded as a row"
        return dict(found)

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(scope="module")
def publish() -> Iterator[Publish]:
    with tempfile.TemporaryDirectory(prefix="pollux-fuzz-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)  # the server runs as another user
        with DevPostgres(Path(folder) / "postgres") as postgres:
            for url in (postgres.admin_url, postgres.url):
                store = Store(url, CLUSTER)
                store.migrate()
                store.close()
            introduce(postgres, CLUSTER, JOB, UID)
            gateway = Gateway(postgres)
            assert gateway.publish(json.dumps(SOUND)) is not None
            yield gateway.publish
            gateway.close()


def assert_refused_or_decided(found: dict[str, Any] | None) -> None:
    if found is None:
        return
    now = time.time()
    try:
        report = rows.report(found)
    except ReportError:
        return
    assert_sensible(report)
    believed = TrustedReports().trust({JOB: report}, {JOB: Held(4, 1, 4, 1)}, now).reports
    job = SnapshotJob(JOB, "j", "ada", "lab", "main", JobSpec(), now - 100, 100.0, report=believed[JOB])
    other = SnapshotJob(8, "j", "bob", "lab", "main", JobSpec(), now - 100, 100.0)
    plan = decide(Snapshot(CLUSTER, now, (Node("n1", 4), Node("n2", 4)), (job, other)))
    assert math.isfinite(plan.objective)
    for allocation in plan.allocations:
        assert math.isfinite(allocation.goodput)
        assert 0 <= allocation.placement.gpus <= 8


def assert_sensible(report: Report) -> None:
    for field in fields(report):
        value = getattr(report, field.name)
        numbers = value if isinstance(value, tuple) else (value,)
        assert all(math.isfinite(n) for n in numbers if isinstance(n, float)), f"{field.name}={value}"
    assert report.gpu_type.isprintable()
    assert report.refused_why.isprintable()
    assert len(report.refused_why) <= 300


@given(changed(ORDINARY) | changed(SOUND | EXTRA))
@example(SOUND | {"at": 10**400})
@example(SOUND | {"gpu_type": "\ud800"})
@example(SOUND | {"resize_refused": {"id": 5, "why": "\0" * 4096}})
@example(SOUND | {"params": {**SOUND["params"], "gamma": 10, "alpha_rack": 1.0}})
@example(SOUND | {"noise": {"sqr": 5e-324, "var": 1e300}})
def test_a_report_with_other_values_is_refused_or_decided_on(
    publish: Publish, report: dict[str, Any]
) -> None:
    assert_refused_or_decided(publish(json.dumps({**report, "at": report.get("at", 0)})))


@given(
    st.one_of(
        json_values.map(json.dumps),
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    )
)
@example("[" * 9000)
@example('{"v": 1e-999999}')
@example('{"v": "\\u0000"}')
def test_any_text_is_refused(publish: Publish, text: str) -> None:
    assert publish(text) is None
