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


def encode(payload: str) -> str:
    """Return a munge credential."""
    return Munge(munge_socket()).encode(payload.encode()).decode()


def ask(order: dict[str, Any]) -> None:
    connection = http.client.HTTPConnection(urlsplit(order["url"]).netloc, timeout=LONGEST_S)
    token, credential = order.get("token") or "", order.get("credential")

    def answer(method: str, path: str, document: Any) -> Any:
        """Print an answer; return its document."""
        began = time.monotonic()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        body = document.encode() if isinstance(document, str) else json.dumps(document).encode()
        try:
            connection.request(method, path, None if document is None else body, headers)
            response = connection.getresponse()
            status, content = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()  # the next request makes it again
            status, content = 0, json.dumps(f"{type(error).__name__}: {error}").encode()
        found: Any = content.decode(errors="replace")
        with contextlib.suppress(ValueError):
            found = json.loads(content)
        seconds = round(time.monotonic() - began, 3)
        print(json.dumps({"status": status, "document": found, "seconds": seconds}), flush=True)
        return found

    if "payload" in order:
        credential = encode(json.dumps(order["payload"]))
    if credential:
        bought = answer("POST", "/v1/tokens", {"credential": credential})
        token = bought.get("token", token) if isinstance(bought, dict) else token
    end, left = time.monotonic() + order.get("until_s", 0.0), order.get("times", 1)
    while left > 0 or time.monotonic() < end:
        left -= 1
        for request in order.get("requests", []):
            answer(*request)
            time.sleep(order.get("pause_s", 0.0))


if __name__ == "__main__":
    run(encode, ask)
