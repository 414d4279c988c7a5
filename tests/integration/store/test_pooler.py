"""Agents report through PgBouncer, as contrib/pgbouncer sets it up."""

from __future__ import annotations

import json
from dataclasses import replace

import psycopg2
import pytest

from contrib.devcluster.pooler import pooler
from contrib.devcluster.postgres import DevPostgres
from pollux.scheduler.database import JobDatabase, TicketOver
from pollux.slurm_job.ticket import Ticket
from polluxd.store import Store
from tests.integration.store.conftest import introduce, payload
from tests.integration.store.credentials import login, token

pytestmark = pytest.mark.slurm


def test_agents_of_several_users_report_through_pgbouncer(
    postgres: DevPostgres, cluster: str, store: Store
) -> None:
    assert store.lead() is not None
    body = json.dumps(payload())
    with pooler(postgres) as (_, dsn):
        tickets = {}
        for job_id, uid in ((1, 1000), (2, 1000), (3, 1001)):
            introduce(postgres, cluster, job_id, uid)
            words = login(postgres, cluster, uid).replace(postgres.agent_dsn, dsn)
            tickets[job_id] = Ticket(cluster, job_id, 0, uid, token(cluster, job_id, 0, uid), words)
        for ticket in tickets.values():
            JobDatabase(ticket).publish(body)
        store.take_in()
        assert set(store.reports()) == set(tickets)

        # The role is still that of the user: a session that another user's agent used lends nobody its rights.
        with pytest.raises(TicketOver):
            JobDatabase(replace(tickets[3], dsn=tickets[1].dsn)).publish(body)
        # The pooler gives no way in to polluxd's own role, although the password is right.
        owner, port = postgres.url.replace("+psycopg2", ""), dsn.split()[1].removeprefix("port=")
        with pytest.raises(psycopg2.OperationalError):
            psycopg2.connect(owner.replace(f":{postgres.port}/", f":{port}/"))
