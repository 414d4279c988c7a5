"""The gateway's statements: prepared, on one connection for each thread.

The gateway logs in as `pollux_gateway`, which may run these and little else.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import psycopg2
from sqlalchemy import URL

from polluxd.gateway.records import Holder, Orders, Refusal, SentReport

from .connection import Connector, our_errors
from .sqlfiles import queries

MOST_REPORTS, MOST_BYTES = 250_000, 2**28
"""What a user's jobs report on a day (UTC), until each of them reports once in 5 minutes."""
_WORD = re.compile(r"(?<![:\w]):([a-z_]+)")


@cache
def _prepared(query: str) -> tuple[str, tuple[str, ...]]:
    """Return a query with `$1` for its first `:word`, and its words."""
    words: list[str] = []

    def place(found: re.Match[str]) -> str:
        if found[1] not in words:
            words.append(found[1])
        return f"${words.index(found[1]) + 1}"

    return _WORD.sub(place, queries()[query]), tuple(words)


class GatewayStore:
    """One cluster's rows, as far as users may reach them.

    Args:
        url: of role `pollux_gateway`.
        cluster: Slurm's ClusterName.
        connect_timeout, statement_timeout: seconds.
    """

    def __init__(
        self, url: str | URL, cluster: str, *, connect_timeout: float = 3, statement_timeout: float = 5
    ) -> None:
        self.cluster = cluster
        self._connector = Connector(url, connect_timeout=connect_timeout, statement_timeout=statement_timeout)
        self._mine = threading.local()

    def attempt_of(self, job_id: int, attempt: int) -> tuple[int, Refusal | None] | None:
        found = self._run("attempt_of", job_id=job_id, attempt=attempt)
        return (found[0]["uid"], found[0]["refusal"]) if found else None

    def issue(self, holder: Holder, token_hash: bytes) -> None:
        self._run("issue_token", hash=token_hash.hex(), **holder._asdict())

    def token_of(self, token_hash: bytes) -> tuple[Holder, Refusal | None] | None:
        found = self._run("token_of", hash=token_hash.hex())
        if not found:
            return None
        refusal = found[0].pop("refusal")
        return Holder(**found[0]), refusal

    def store_reports(self, reports: Sequence[SentReport]) -> list[Refusal | None]:
        sent = [
            _attempt(report.holder) | {"place": place, "report": report.document}
            for place, report in enumerate(reports)
        ]
        bounds = {"most_bytes": MOST_BYTES, "most_reports": MOST_REPORTS}
        found = self._run("store_reports", reports=json.dumps(sent, allow_nan=False), **bounds)
        return [row["refusal"] for row in found]

    def acknowledge(self, holder: Holder, move_id: int, facts: Mapping[str, Any]) -> Refusal | bool:
        found = self._run("acknowledge", **_attempt(holder), move_id=move_id, facts=json.dumps(facts))
        return (found[0]["refusal"] or found[0]["accepted"]) if found else "unknown"

    def introduce(
        self, holder: Holder, fingerprint: str, gpu_type: str
    ) -> Refusal | Mapping[str, Any] | None:
        found = self._run("introduce", **_attempt(holder), fingerprint=fingerprint, gpu_type=gpu_type)
        if not found:
            return "unknown"
        refusal: Refusal | None = found[0].pop("refusal")
        return refusal if refusal or found[0]["params"] is None else found[0]

    def open_orders(self) -> Mapping[int, Orders]:
        return {row["job_id"]: _orders(row) for row in self._run("open_orders")}

    def over(self, holders: Sequence[Holder]) -> set[Holder]:
        asked = [_attempt(holder) | {"place": place} for place, holder in enumerate(holders)]
        return {holders[row["place"]] for row in self._run("attempts_over", asked=json.dumps(asked))}

    def _run(self, query: str, /, **words: object) -> list[dict[str, Any]]:
        """Run a statement, a transaction; where the connection was lost, on a new one: twice does no harm."""
        with our_errors(self._connector.place, self._connector.failed):
            while True:
                fresh = getattr(self._mine, "connection", None) is None
                try:
                    return self._execute(query, {"cluster": self.cluster, **words})
                except psycopg2.Error as error:
                    self._disconnect()
                    if fresh or (error.pgcode is not None and not error.pgcode.startswith(("08", "57P"))):
                        raise

    def _execute(self, query: str, words: Mapping[str, object]) -> list[dict[str, Any]]:
        mine = self._mine
        if getattr(mine, "connection", None) is None:
            mine.connection, mine.prepared = self._connector.open(), set()
            mine.connection.autocommit = True
        text, names = _prepared(query)
        with mine.connection.cursor() as cursor:
            if query not in mine.prepared:
                # Planned once: no plan depends on the values.
                cursor.execute(f"SET plan_cache_mode = force_generic_plan; PREPARE {query} AS {text}")
                mine.prepared.add(query)
            slots = ", ".join(["%s"] * len(names))
            cursor.execute(
                f"EXECUTE {query} ({slots})" if slots else f"EXECUTE {query}", [words[n] for n in names]
            )
            if cursor.description is None:
                return []
            columns = [column.name for column in cursor.description]
            return [dict(zip(columns, row, strict=True)) for row in cursor]

    def _disconnect(self) -> None:
        connection, self._mine.connection = getattr(self._mine, "connection", None), None
        if connection is not None:
            with contextlib.suppress(psycopg2.Error):
                connection.close()


def _attempt(holder: Holder) -> dict[str, int | None]:
    return {"job_id": holder.job_id, "attempt": holder.attempt, "uid": holder.uid}


def _orders(row: Mapping[str, Any]) -> Orders:
    if row["path"] != "resize":
        return Orders(row["attempt"], row["id"], None)
    resize = {
        "id": row["id"],
        "path": row["path"],
        "kind": "grow" if row["grows"] else "shrink",
        "nodes": row["target"]["nodes"],
        "gpus_per_node": row["target"]["gpus_per_node"],
        "step": row["step"],
    }
    return Orders(row["attempt"], None, resize | ({"nonce": row["nonce"]} if row["grows"] else {}))
