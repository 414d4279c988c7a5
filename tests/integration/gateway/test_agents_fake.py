"""The gateway of the agent's unit tests answers as the real one does."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.integration.gateway.serving import Caller, serving
from tests.integration.store.reports import payload
from tests.unit.agent.scheduler import fake_gateway

pytestmark = pytest.mark.slurm

JOB, ATTEMPT = fake_gateway.JOB, fake_gateway.ATTEMPT
PURPOSE = {"purpose": "attempt", "cluster": "", "job": JOB, "attempt": ATTEMPT, "nonce": "0" * 32}
CREDENTIAL = fake_gateway.credential_of(json.dumps(PURPOSE).encode()).decode()


class OwnCredentials:
    """Takes a payload for a credential of this process's user."""

    def decode(self, credential: bytes) -> tuple[bytes, int]:
        return fake_gateway.payload_of(credential), os.getuid()


def shape(answer: Any) -> Any:
    """Return the names of an answer's members, and the types of their values."""
    if not isinstance(answer, dict):
        return answer
    if "error" in answer:
        return answer["error"]["code"]
    return {name: type(value).__name__ for name, value in answer.items()}


def conversation(url: str) -> list[Any]:
    """Send every message that an agent has, and return the shapes of the answers."""
    stranger = Caller(url)
    answers = [stranger.ask("POST", "/v1/report", payload())]
    status, grant = stranger.ask("POST", "/v1/tokens", {"credential": CREDENTIAL})
    assert (status, grant["nonce"]) == (200, PURPOSE["nonce"])
    assert grant["token"].startswith(f"J.{JOB}.{ATTEMPT}.")
    grant["publish_interval_s"] = float(grant["publish_interval_s"])
    job = Caller(url, grant["token"])
    answers += [(status, grant), job.ask("POST", "/v1/report", payload())]
    status, orders = job.ask("GET", "/v1/orders?seen=")
    assert (orders["drain"], orders["resize"]) == (None, None)
    answers += [
        (status, orders),
        job.ask("GET", "/v1/orders?seen=other"),
        job.ask("POST", "/v1/acknowledgements", {"move": 999_999, "step": 3}),
        job.ask("POST", "/v1/training", {"fingerprint": "0" * 32, "gpu_type": ""}),
        job.ask("GET", "/v1/nothing"),
        Caller(url, grant["token"][:-1] + "!").ask("POST", "/v1/report", payload()),
    ]
    return [(status, shape(answer)) for status, answer in answers]


def test_the_fake_answers_as_the_gateway_does(records: Any, store: Any, cluster: str, seen: Any) -> None:
    store.sync_jobs([seen(JOB, uid=os.getuid(), restart_count=ATTEMPT)])
    with serving(records, cluster=cluster, munge=OwnCredentials()) as url:
        real = conversation(url)
    stand_in = fake_gateway.FakeGateway()
    stand_in.gpu_type = ""
    with fake_gateway.serving(stand_in) as url:
        assert conversation(url) == real
