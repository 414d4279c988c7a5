"""Log in to Postgres, and run statements there.

An order has `logins` (connection strings of libpq), `statements` (run on each connection), and optionally `times`
(run them so often), `hold_s` (stay connected for so long). Each login and statement is answered by one line of JSON:
{"ok", "text"}.
"""

from __future__ import annotations

import json
import time
from typing import Any

import psycopg2

from contrib.attack.hands import run


def tell(ok: bool, text: object) -> None:
    print(json.dumps({"ok": ok, "text": " ".join(str(text).split())[:600]}), flush=True)


def execute(connection: Any, statement: str) -> None:
    try:
        with connection.cursor() as cursor:
            cursor.execute(statement)
            tell(True, cursor.fetchall() if cursor.description else cursor.statusmessage)
    except psycopg2.Error as error:
        tell(False, f"{error.pgcode}: {error}")


def ask(order: dict[str, Any]) -> None:
    connections = []
    for login in order["logins"]:
        try:
            connections.append(psycopg2.connect(login))
        except psycopg2.Error as error:
            tell(False, error)
            continue
        connections[-1].autocommit = True
        tell(True, "let in")
    for _ in range(order.get("times", 1)):
        for connection in connections:
            for statement in order["statements"]:
                execute(connection, statement)
    time.sleep(order.get("hold_s", 0))


if __name__ == "__main__":
    run(ask)
