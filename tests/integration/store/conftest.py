"""The session's private Postgres, with a cluster name for each test."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg2
import pytest

from contrib.devcluster.postgres import DevPostgres
from pollux.slurm_job.ticket import Ticket
from polluxd.store import Store
from tests.integration.store.credentials import SECRET, login, token
from tests.integration.store.slurm_job import Seen

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
    """Makes stores of this test's cluster; all are closed at its end."""
    made: list[Store] = []

    def make(**options: Any) -> Store:
        made.append(Store(postgres.url, cluster, **{"lease_s": 0.3, **options}))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(new_store: Callable[..., Store]) -> Store:
    made = new_store()
    made.install_secret(SECRET)
    return made


@pytest.fixture
def seen() -> type[Seen]:
    return Seen


def introduce(postgres: DevPostgres, cluster: str, job_id: int, uid: int) -> None:
    """Let polluxd have seen a job that runs, and its user."""
    with psycopg2.connect(postgres.url.replace("+psycopg2", "")) as connection, connection.cursor() as cursor:
        job = (
            "INSERT INTO pollux.job (cluster, job_id, uid, spec, state, submitted_at, most_gpus, most_nodes)"
            " VALUES (%s, %s, %s, '{}', 'RUNNING', now() - interval '1 hour', 64, 8) ON CONFLICT DO NOTHING"
        )
        cursor.execute(job, (cluster, job_id, uid))
        # Also the user of a job that has ended: its agent may still run.
        cursor.execute(job, (cluster, 10**9, uid))
        cursor.execute("SELECT trouble FROM pollux.admit_users(%s) WHERE trouble IS NOT NULL", (cluster,))
        assert cursor.fetchall() == []
        cursor.execute("DELETE FROM pollux.job WHERE cluster = %s AND job_id = %s", (cluster, 10**9))
    connection.close()


def payload(**changes: Any) -> dict[str, Any]:
    """A sound report; `changes` replace members."""
    return {
        "v": 1,
        "at": time.time(),
        "params": dict.fromkeys(
            ("alpha_grad", "beta_grad", "alpha_local", "beta_local", "alpha_node", "beta_node"), 0.01
        )
        | {"gamma": 1.5},
        "noise": {"sqr": 2.0, "var": 6.0},
        "limits": {"initial": 32, "maximum": 1024, "local_min": 8, "local_max": 256},
        **{"explored_gpus": 4, "explored_nodes": 1, "gpus": 4, "nodes": 1},
        **{"batch_size": 128, "local_batch": 32, "accumulation": 0},
        **{"goodput": 90.0, "throughput": 100.0, "progress": 10.0, "target": 500.0, "epoch": 1.5},
        **{"lr_factor": 2.0, "gain": 1.9, "optimizer_steps": 12, "checkpointed": False},
        "times": {"launched_at": time.time() - 5, "first_step_at": None},
        "restart_cost": None,
        **changes,
    }


class Agent:
    """The rights of a job on the database.

    A job connects as its user's role and calls functions.
    """

    def __init__(
        self,
        postgres: DevPostgres,
        cluster: str,
        job_id: int,
        *,
        attempt: int = 0,
        uid: int = 1000,
        by: str | None = None,
    ) -> None:
        self.credentials = (
            *(cluster, job_id, attempt, uid),
            token(cluster, job_id, attempt, uid) if by is None else by,
        )
        introduce(postgres, cluster, job_id, uid)
        self.connection = psycopg2.connect(login(postgres, cluster, uid))
        self.connection.autocommit = True

    def sql(self, statement: str, *words: object) -> Any:
        with self.connection.cursor() as cursor:
            cursor.execute(statement, words)
            return cursor.fetchone()[0] if cursor.description else None

    def publish(self, body: dict[str, Any] | None = None, *, text: str | None = None) -> Any:
        encoded = json.dumps(payload() if body is None else body) if text is None else text
        return self.sql("SELECT pollux.publish_v1(%s, %s, %s, %s, %s, %s)", *self.credentials, encoded)

    def instructions(self) -> Any:
        return self.sql("SELECT pollux.instructions_v1(%s, %s, %s, %s, %s)", *self.credentials)

    def acknowledge(self, move_id: int, **stamps: float) -> Any:
        return self.sql(
            "SELECT pollux.acknowledge_v1(%s, %s, %s, %s, %s, %s, %s)",
            *self.credentials,
            move_id,
            json.dumps(stamps),
        )


@pytest.fixture
def agent(postgres: DevPostgres, cluster: str) -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def make(job_id: int, **options: Any) -> Agent:
        made.append(Agent(postgres, cluster, job_id, **options))
        return made[-1]

    yield make
    for one in made:
        one.connection.close()


@pytest.fixture
def report() -> Callable[..., dict[str, Any]]:
    return payload


@pytest.fixture
def sign() -> Callable[..., str]:
    return token


@pytest.fixture
def ticket_for() -> Callable[..., Ticket]:
    """Makes tickets of jobs that polluxd knows."""

    def make(
        postgres: DevPostgres,
        cluster: str,
        job_id: int,
        *,
        attempt: int = 0,
        uid: int = 1000,
        interval: float = 0.2,
    ) -> Ticket:
        introduce(postgres, cluster, job_id, uid)
        signed = token(cluster, job_id, attempt, uid)
        return Ticket(cluster, job_id, attempt, uid, signed, login(postgres, cluster, uid), interval)

    return make
