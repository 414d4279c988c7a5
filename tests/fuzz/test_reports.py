"""Fuzz report payloads: the database and polluxd refuse them or decide.

Each payload goes the whole way that an agent's report goes: `publish_v1` with the role of the job's user, the row, the
checks of polluxd, and a decision.
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
import psycopg2.extensions
import psycopg2.extras
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contrib.devcluster.postgres import DevPostgres
from polluxd.errors import ReportError
from polluxd.model import JobSpec, Node, Report, Snapshot, SnapshotJob
from polluxd.policy import decide
from polluxd.store import Store, rows
from polluxd.trusted_reports import Held, TrustedReports
from tests.fuzz.json_values import json_values
from tests.integration.store.conftest import introduce, payload
from tests.integration.store.credentials import SECRET, mac, token

CLUSTER, JOB, UID = "fuzz", 7, 1000
SOUND = payload()
REFUSED, NO_JSON = "PX422", "no JSON"
OWN = ["id", "cluster", "job_id", "attempt", "uid", "received_at", "wakes"]
"""The columns that are not of the payload."""
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
}
EXTRA |= {"measured_gpus": 4, "measured_nodes": 1, "prior_gpus": 2, "prior_nodes": 1, "prior_refuted": False}
ORDINARY = SOUND | EXTRA
"""One statement decodes it (publish_v1); advice and a refusal are left to report_of."""
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


class Database:
    """Publish as the job's agent does, and read the row as polluxd does.

    Every transaction is rolled back.
    """

    def __init__(self, postgres: DevPostgres) -> None:
        self._connection = psycopg2.connect(postgres.admin_url.replace("+psycopg2", ""))
        self._role = f"pollux_{CLUSTER}_{UID}_{mac(SECRET, 'role')[:4]}"
        self._words = (CLUSTER, JOB, 0, UID, token(CLUSTER, JOB, 0, UID))

    def publish(self, text: str) -> dict[str, Any] | str:
        """Return the report's row, or the SQLSTATE of the refusal.

        `NO_JSON`: it was Postgres that read no JSON in the text.
        """
        with self._connection.cursor(cursor_factory=psycopg2.extras.RealDictCursor) as cursor:
            try:
                cursor.execute(
                    "SET LOCAL SESSION AUTHORIZATION "
                    + psycopg2.extensions.quote_ident(self._role, cursor)
                    + "; SELECT pollux.publish_v1(%s, %s, %s, %s, %s, %s); SET LOCAL SESSION AUTHORIZATION DEFAULT;"
                    " SELECT r.*, to_jsonb(r) - %s::text[] AS stored, to_jsonb(e) - %s::text[] AS expected"
                    " FROM pollux.report r, pollux.report_of(%s) e WHERE r.cluster = %s AND r.job_id = %s",
                    (*self._words, text, OWN, OWN, text, CLUSTER, JOB),
                )
                found = dict(cursor.fetchone())
            except psycopg2.Error as error:
                code = str(error.pgcode)
            else:
                assert found.pop("stored") == found.pop("expected")
                return found
            finally:
                self._connection.rollback()
            if code == REFUSED:
                return code
            try:
                cursor.execute("SELECT CAST(%s AS jsonb)", (text,))
            except psycopg2.Error as error:
                return NO_JSON if error.pgcode == code else code
            finally:
                self._connection.rollback()
            return code

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(scope="module")
def publish() -> Iterator[Callable[[str], dict[str, Any] | str]]:
    with tempfile.TemporaryDirectory(prefix="pollux-fuzz-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)  # the server runs as another user
        with DevPostgres(Path(folder) / "postgres") as postgres:
            for url in (postgres.admin_url, postgres.url):
                store = Store(url, CLUSTER)
                store.migrate()
                store.install_secret(SECRET)
                store.close()
            introduce(postgres, CLUSTER, JOB, UID)
            database = Database(postgres)
            assert isinstance(database.publish(json.dumps(SOUND)), dict)
            yield database.publish
            database.close()


def assert_refused_or_decided(found: dict[str, Any] | str) -> None:
    if isinstance(found, str):
        assert found in (REFUSED, NO_JSON)
        return
    now = time.time()
    try:
        report = rows.report(found, now)
    except ReportError:
        return
    assert_sensible(report)
    believed, _ = TrustedReports().trust({JOB: report}, {JOB: Held(4, 1, 4, 1)}, now)
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
@example(SOUND | {"params": {**SOUND["params"], "gamma": 10, "alpha_rack": 1.0}})
@example(SOUND | {"noise": {"sqr": 5e-324, "var": 1e300}})
def test_a_report_with_other_values_is_refused_or_decided_on(
    publish: Callable[[str], dict[str, Any] | str], report: dict[str, Any]
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
def test_any_text_is_refused(publish: Callable[[str], dict[str, Any] | str], text: str) -> None:
    assert publish(text) in (REFUSED, NO_JSON)
