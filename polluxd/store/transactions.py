"""Named queries in transactions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import Connection, text

from .connection import Connector, our_errors
from .leadership import Leadership
from .sqlfiles import queries


class QueryRunner:
    """Run a query by its name; return its rows as mappings."""

    def __init__(self, connection: Connection, cluster: str) -> None:
        self._connection = connection
        self._cluster = cluster

    def __call__(self, query: str, /, **parameters: object) -> list[dict[str, Any]]:
        result = self._connection.execute(text(queries()[query]), {"cluster": self._cluster, **parameters})
        if not result.returns_rows:
            return []
        columns = tuple(result.keys())
        return [dict(zip(columns, row, strict=True)) for row in result]


class Session(Leadership):
    """One cluster's rows in one database, and this process's candidacy to lead it."""

    def __init__(self, connector: Connector, cluster: str, *, lease_s: float) -> None:
        super().__init__(connector, cluster, lease_s=lease_s)
        self._engine = connector.engine()
        self._readers = self._engine.execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )

    def watch_failures(self, failed: Callable[[str], None]) -> None:
        """Call `failed`, in any thread, for each transaction that fails from now on (`Connector.failed`)."""
        self._connector.failed = failed

    @contextlib.contextmanager
    def _reading(self) -> Iterator[QueryRunner]:
        """Run named queries that all see the database at one moment."""
        with our_errors(self._connector.place, self._connector.failed), self._readers.begin() as connection:
            yield QueryRunner(connection, self.cluster)

    @contextlib.contextmanager
    def _transaction(self, *, fenced: bool = False) -> Iterator[QueryRunner]:
        """Run named queries in one transaction; `fenced`: refused where this process led and no longer leads."""
        with our_errors(self._connector.place, self._connector.failed), self._engine.begin() as connection:
            run = QueryRunner(connection, self.cluster)
            if fenced and self.epoch is not None:
                run("fence", epoch=self.epoch)
            yield run

    def _ask(self, query: str, /, **parameters: object) -> list[dict[str, Any]]:
        """Run one named query in a transaction of its own."""
        with self._transaction() as run:
            return run(query, **parameters)
