"""The session's Postgres, and a gateway in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from polluxd.store import Store
from polluxd.store.gateway_statements import GatewayStore
from tests.integration.gateway.serving import Caller, serving, token_of
from tests.integration.store.conftest import cluster, new_store, postgres, records, seen_jobs, store

__all__ = ["cluster", "new_store", "postgres", "records", "seen_jobs", "store"]


@pytest.fixture
def url(records: GatewayStore, cluster: str) -> Iterator[str]:
    with serving(records, cluster=cluster) as found:
        yield found


@pytest.fixture
def caller(url: str, records: GatewayStore, store: Store, seen: Any) -> Callable[..., Caller]:
    """Makes clients with a token of an attempt; polluxd has seen their jobs."""
    known: dict[int, Any] = {}

    def make(job_id: int, *, uid: int = 1000, attempt: int = 0) -> Caller:
        known.setdefault(job_id, seen(job_id, uid=uid, restart_count=attempt))
        store.sync_jobs(list(known.values()))
        return Caller(url, token_of(records, job_id, uid=uid, attempt=attempt))

    return make
