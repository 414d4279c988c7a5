"""Run statements in Postgres with the rights of a ticket.

python -m contrib.attack.hands.sql ORDER

ORDER is JSON: `ticket` (a file), `statements`, and optionally `login` (libpq parameters over the ticket's),
`connections` (open this many, run the statements on each), `times` (run the statements so often), `hold_s` (stay
connected for so long). Each statement is answered by one line of JSON: {"ok", "text"}. In a statement {me} is the
ticket's credentials as SQL.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

import psycopg2


def tell(ok: bool, text: object) -> None:
    print(json.dumps({"ok": ok, "text": " ".join(str(text).split())[:600]}), flush=True)


def credentials(ticket: dict[str, Any]) -> dict[str, str]:
    """Return the words that a statement may name, as SQL literals."""
    words = {
        "{cluster}": f"'{ticket['cluster']}'",
        "{job}": str(ticket["job_id"]),
        "{attempt}": str(ticket["attempt"]),
        "{uid}": str(ticket["uid"]),
        "{token}": f"'{ticket['token']}'",
    }
    return words | {"{me}": ", ".join(words.values())}


def run(connection: Any, statement: str) -> None:
    try:
        with connection.cursor() as cursor:
            cursor.execute(statement)
            tell(True, cursor.fetchall() if cursor.description else "done")
    except psycopg2.Error as error:
        tell(False, f"{error.pgcode}: {error}")


def main() -> None:
    order = json.loads(sys.argv[1])
    with open(order["ticket"], encoding="utf-8") as file:
        ticket = json.load(file)
    words = credentials(ticket)
    statements = []
    for text in order["statements"]:
        for name, value in words.items():
            text = text.replace(name, value)  # noqa: PLW2901 - one word after the other
        statements.append(text)
    connections = []
    for _ in range(order.get("connections", 1)):
        try:
            connections.append(psycopg2.connect(ticket["dsn"], **order.get("login", {})))
        except psycopg2.Error as error:
            tell(False, error)
            break
        connections[-1].autocommit = True
    for _ in range(order.get("times", 1)):
        for connection in connections:
            for statement in statements:
                run(connection, statement)
    if order.get("hold_s"):
        tell(True, f"holds {len(connections)} connections")
        time.sleep(order["hold_s"])
    for connection in connections:
        with contextlib.suppress(psycopg2.Error):
            connection.close()


if __name__ == "__main__":
    main()
