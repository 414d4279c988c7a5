"""The session's private Postgres, with a cluster name for each test."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from contrib.devcluster.postgres import DevPostgres
from pollux.slurm_job.access import GatewayAccess, Grant
from polluxd.gateway.order_watch import answer_of
from polluxd.gateway.payloads import Acknowledgement, ReportMessage, TrainingMessage
from polluxd.gateway.records import Holder, SentReport
from polluxd.model import Move, Step
from polluxd.slurm.protocol import SlurmJob
from polluxd.store import Store
from polluxd.store.gateway_statements import GatewayStore
from tests.integration.gateway.serving import serving, token_of
from tests.integration.store.reports import payload
from tests.integration.store.slurm_job import seen

_names = (f"cluster{n}" for n in itertools.count(1))


@pytest.fixture(scope="session")
def postgres(dev_postgres: DevPostgres) -> DevPostgres:
    """With the schema, and the roles as a superuser makes them."""
    store = Store(dev_postgres.admin_url, "any")
    store.migrate()
    store.close()
    return dev_postgres


@pytest.fixture
def cluster() -> str:
    return next(_names)


@pytest.fixture
def new_store(postgres: DevPostgres, cluster: str) -> Iterator[Callable[..., Store]]:
    """Makes stores, of this test's cluster unless said otherwise; all are closed at its end."""
    made: list[Store] = []

    def make(url: str = postgres.url, name: str = cluster, **options: Any) -> Store:
        made.append(Store(url, name, **{"lease_s": 0.3, **options}))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(new_store: Callable[..., Store]) -> Store:
    return new_store()


@pytest.fixture
def epoch(store: Store) -> int | None:
    """Of the test's store, which leads."""
    return store.lead()


def advance(store: Store, epoch: int, move: Move, *steps: Step) -> None:
    """Bring a move on, step by step."""
    for step in steps:
        assert store.advance(move.id, step, time.time(), epoch=epoch)


@pytest.fixture
def records(postgres: DevPostgres, cluster: str) -> GatewayStore:
    """The gateway's statements, with its rights."""
    return GatewayStore(postgres.gateway_url, cluster)


@pytest.fixture(name="seen")
def seen_jobs() -> Callable[..., SlurmJob]:
    return seen


def introduce(postgres: DevPostgres, cluster: str, job_id: int, uid: int) -> None:
    """Let polluxd have seen a job that runs."""
    postgres.execute(
        "INSERT INTO pollux.job (cluster, job_id, uid, spec, state, submitted_at, started_at, most_gpus, most_nodes)"
        f" VALUES ('{cluster}', {job_id}, {uid}, '{{}}', 'RUNNING', now() - interval '1 hour', now(), 64, 8)"
        " ON CONFLICT DO NOTHING"
    )


class RefusedByStore(Exception):
    """The gateway's statement refused."""


class Agent:
    """What an agent reaches through the gateway: models and statements."""

    def __init__(
        self, postgres: DevPostgres, records: GatewayStore, job_id: int, *, attempt: int = 0, uid: int = 1000
    ) -> None:
        self.holder = Holder(uid, job_id, attempt)
        self._records = records
        introduce(postgres, records.cluster, job_id, uid)

    def publish(self, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Store a report; return the orders."""
        report = ReportMessage.model_validate_json(json.dumps(payload() if body is None else body))
        (refusal,) = self._records.store_reports([SentReport(self.holder, report.document())])
        if refusal is not None:
            raise RefusedByStore(refusal)
        return self.instructions()

    def instructions(self) -> dict[str, Any]:
        assert self.holder.job_id is not None
        orders = self._records.open_orders().get(self.holder.job_id)
        answer = answer_of(orders, self.holder.attempt)
        resize = answer.resize and answer.resize.model_dump(exclude_defaults=True)
        return {"drain": answer.drain, "resize": resize}

    def acknowledge(self, move_id: int, **stamps: float) -> bool:
        said = Acknowledgement.model_validate_json(json.dumps({"move": move_id, **stamps}))
        accepted = self._records.acknowledge(self.holder, said.move, said.facts())
        if isinstance(accepted, str):
            raise RefusedByStore(accepted)
        return accepted

    def prior(self, fingerprint: str, gpu_type: str = "") -> Any:
        runs = TrainingMessage(fingerprint=fingerprint, gpu_type=gpu_type)
        found = self._records.introduce(self.holder, runs.fingerprint, runs.gpu_type)
        if isinstance(found, str):
            raise RefusedByStore(found)
        return found


@pytest.fixture
def agent(postgres: DevPostgres, records: GatewayStore) -> Callable[..., Agent]:
    def make(job_id: int, **options: Any) -> Agent:
        return Agent(postgres, records, job_id, **options)

    return make


@pytest.fixture
def report() -> Callable[..., dict[str, Any]]:
    return payload


@pytest.fixture
def access_for(records: GatewayStore, cluster: str) -> Iterator[Callable[..., GatewayAccess]]:
    """Makes access of attempts to a gateway of this test, with a token."""
    with serving(records, cluster=cluster) as url:

        def make(
            postgres: DevPostgres, job_id: int, *, attempt: int = 0, uid: int = 1000, interval: float = 0.2
        ) -> GatewayAccess:
            introduce(postgres, cluster, job_id, uid)
            grant = Grant(token_of(records, job_id, attempt=attempt, uid=uid), interval)
            return GatewayAccess((url,), "", job_id, attempt, grant)

        yield make
