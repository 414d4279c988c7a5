"""A database that is down, frozen, or comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import psycopg2
import pytest
from sqlalchemy import make_url

from contrib.devcluster.postgres import DevPostgres
from contrib.devcluster.processes import descendants, wait_until
from pollux.scheduler.publisher import Publisher
from pollux.slurm_job.access import GatewayAccess, Grant
from polluxd.errors import StoreUnavailable
from polluxd.model import NO_PLACEMENT, Placement, Step
from polluxd.store import Store
from polluxd.store.gateway_statements import GatewayStore
from tests.integration.gateway.serving import Caller, serving, token_of
from tests.integration.store.conftest import introduce
from tests.integration.store.reports import payload

pytestmark = pytest.mark.slurm

N1 = Placement(("n1",), 4)


@pytest.fixture(scope="module")
def server():
    """A Postgres of this module's own: it is stopped and frozen here."""
    with tempfile.TemporaryDirectory(prefix="pollux-pg-") as folder:
        Path(folder).chmod(0o755)
        with DevPostgres(Path(folder) / "pg") as postgres:
            yield postgres


@pytest.fixture
def store(server):
    made = Store(server.url, "c", connect_timeout=3, statement_timeout=3, lease_s=0.3)
    made.migrate()
    yield made
    made.close()


@pytest.fixture
def url(server, store):
    with serving(GatewayStore(server.gateway_url, "c", statement_timeout=3), cluster="c") as found:
        yield found


@pytest.fixture
def access(server, url):
    """Of job 7 to the gateway, with a token."""
    introduce(server, "c", 7, 1000)
    grant = Grant(token_of(GatewayStore(server.gateway_url, "c"), 7), 0.5)
    return GatewayAccess((url,), "", 7, 0, grant)


def freeze(server, number):
    """Send a signal that stops or continues every Postgres process.

    While Postgres is stopped, connections stay open and nobody answers.
    """
    for each in [server.pid, *descendants([server.pid])]:
        with contextlib.suppress(ProcessLookupError):  # a child of Postgres may end at any time
            os.kill(each, number)


def eventually(condition):
    wait_until(condition, 80, "the store or its gateway")


def test_a_stopped_database_is_told_and_recovered_from(store, server):
    store.settings()
    password = make_url(server.url).password
    server.stop()
    calls = (
        store.settings,
        store.reports,
        store.records,
        lambda: store.sync_jobs([]),
        lambda: store.record_cycle(None, mode="observe", durations={}, started_at=1.0),
        lambda: store.plan_move(7, 0, "start", NO_PLACEMENT, N1, "x", 1),
        lambda: store.advance(1, Step.DRAINING, 1.0, epoch=1),
        store.lead,
        store.migrate,
    )
    try:
        for call in calls:
            with pytest.raises(StoreUnavailable) as caught:
                call()
            assert password not in str(caught.value)
        assert not store.still_leading()
        assert store.wait(0.6, for_news=True) is False
    finally:
        server.start()
    store.settings()
    eventually(lambda: store.lead() is not None)


def test_a_crash_under_a_leader_is_noticed(store, server):
    eventually(lambda: store.lead() is not None)
    server.stop(immediate=True)
    assert not store.still_leading()
    eventually(lambda: store.lease_left == 0)
    server.start()
    eventually(lambda: store.lead() is not None)


def test_a_frozen_database_holds_nobody_up(store, server):
    eventually(lambda: store.lead() is not None)
    fresh = Store(server.url, "c", connect_timeout=3, statement_timeout=3)
    freeze(server, signal.SIGSTOP)
    try:
        for call in (store.settings, fresh.settings, fresh.lead):
            with pytest.raises(StoreUnavailable, match="no answer"):
                call()
        assert not store.still_leading()
    finally:
        freeze(server, signal.SIGCONT)
    eventually(lambda: store.lead() is not None)
    store.settings()
    fresh.close()


def test_a_statement_that_takes_too_long_is_unavailability(store, server):
    blocker = psycopg2.connect(server.url.replace("+psycopg2", ""))
    with blocker.cursor() as cursor:
        cursor.execute("LOCK TABLE pollux.setting IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(StoreUnavailable, match="timeout"):
            store.settings()
    blocker.close()


class Training:
    """Stands where the session stands: counts what the publisher asks of it."""

    def __init__(self, report):
        self.body = report()
        self.drains = []
        self.drained = threading.Event()

    def collect(self):
        return dict(self.body, at=time.time())

    def drain(self, move):
        self.drains.append(move)
        self.drained.set()


@pytest.fixture
def training(report):
    return Training(report)


@pytest.fixture
def publisher(access, training):
    made = Publisher(access, training.collect, training.drain, lambda terms: None)
    made.start()
    yield made
    made.close()


def test_reports_survive_a_stop_and_start(publisher, access, store, server, training, caplog):
    eventually(lambda: 7 in store.reports())
    server.stop()
    eventually(lambda: "does not answer" in caplog.text)
    training.body["batch_size"] = 4096 // 8
    server.start()
    publisher.wake()
    eventually(lambda: store.reports()[7].batch_size == 512)
    assert access.grant.token not in caplog.text


def test_an_acknowledgement_is_retried_through_an_outage(publisher, store, server):
    eventually(lambda: store.lead() is not None)
    eventually(lambda: 7 in store.reports())
    move = store.plan_move(7, 0, "requeue", N1, N1, "x", store.epoch)
    store.advance(move.id, Step.DRAINING, time.time(), epoch=store.epoch)
    server.stop()
    answers = []
    waiting = threading.Thread(
        target=lambda: answers.append(publisher.acknowledge(move.id, {"step": 1}, timeout_s=80))
    )
    waiting.start()
    time.sleep(0.3)
    server.start()
    waiting.join(100)
    assert answers == [True]
    eventually(lambda: store.lead() is not None)
    store.advance(move.id, Step.FAILED, time.time(), epoch=store.epoch)


def test_a_frozen_database_bounds_an_acknowledgement(publisher, store, server):
    eventually(lambda: 7 in store.reports())
    freeze(server, signal.SIGSTOP)
    try:
        assert publisher.acknowledge(1, {}, timeout_s=0.2) is False
    finally:
        freeze(server, signal.SIGCONT)


def test_the_gateway_says_that_the_database_is_away_and_recovers(server, url, access):
    job = Caller(url, access.grant.token)
    assert job.ask("POST", "/v1/report", payload())[0] == 204
    first = job.ask("GET", "/v1/orders")[1]["seen"]
    server.stop()
    try:
        assert job.code("POST", "/v1/report", payload()) == (503, "unavailable")
        assert job.code("POST", "/v1/acknowledgements", {"move": 1}) == (503, "unavailable")
        assert job.code("GET", f"/v1/orders?seen={first}") == (503, "unavailable")
        eventually(lambda: job.ask("GET", "/v1/health")[1]["database"] is False)
    finally:
        server.start()
    assert job.ask("POST", "/v1/report", payload())[0] == 204, (
        "at once: connections that were lost are opened again"
    )
    assert job.ask("GET", "/v1/orders")[0] == 200
    eventually(lambda: job.ask("GET", "/v1/health")[1]["database"] is True)
