"""Ask the gateway as a user does.

An order has `url`, and optionally `payload` (of a munge credential, which buys a token), `credential` (one that is
there already), `token`, `requests` (each [method, path, document]), `times` (send them so often), `pause_s` (between
two requests), `until_s` (send them for so long). Each answer is one line of JSON: {"status", "document", "seconds"};
status 0: there was none. The answer to a request for a token comes first.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

from contrib.attack.hands import run
from pollux.scheduler.munge import Munge
from pollux.slurm_job.allocation import munge_socket

LONGEST_S = 20.0


class Client:
    """One connection, which is made again after a fault."""

    def __init__(self, url: str, token: str) -> None:
        self._address = urlsplit(url).netloc
        self.token = token
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, method: str, path: str, document: Any) -> dict[str, Any]:
        began = time.monotonic()
        try:
            status, content = self._ask(method, path, document)
        except (OSError, http.client.HTTPException) as error:
            self._connection = None
            status, content = 0, json.dumps(f"{type(error).__name__}: {error}").encode()
        answer: Any = content.decode(errors="replace")
        with contextlib.suppress(ValueError):
            answer = json.loads(content)
        return {"status": status, "document": answer, "seconds": round(time.monotonic() - began, 3)}

    def _ask(self, method: str, path: str, document: Any) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._address, timeout=LONGEST_S)
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        body = document.encode() if isinstance(document, str) else json.dumps(document).encode()
        self._connection.request(method, path, None if document is None else body, headers)
        response = self._connection.getresponse()
        return response.status, response.read()


def encode(payload: str) -> str:
    """Return a munge credential."""
    return Munge(munge_socket()).encode(payload.encode()).decode()


def ask(order: dict[str, Any]) -> None:
    client = Client(order["url"], order.get("token") or "")
    credential = order.get("credential")
    if "payload" in order:
        credential = encode(json.dumps(order["payload"]))
    if credential:
        answer = client.ask("POST", "/v1/tokens", {"credential": credential})
        print(json.dumps(answer), flush=True)
        if answer["status"] == 200:
            client.token = answer["document"]["token"]
    end, left = time.monotonic() + order.get("until_s", 0.0), order.get("times", 1)
    while left > 0 or time.monotonic() < end:
        left -= 1
        for method, path, document in order.get("requests", []):
            print(json.dumps(client.ask(method, path, document)), flush=True)
            time.sleep(order.get("pause_s", 0.0))


if __name__ == "__main__":
    run(encode, ask)
