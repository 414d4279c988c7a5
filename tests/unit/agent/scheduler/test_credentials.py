"""How an attempt comes to its token, and what happens when it is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pollux.scheduler import credentials
from pollux.scheduler.credentials import AccessOver, Credentials, JobGateway, environment_of_ranks
from pollux.scheduler.gateway import Gateway, GatewayAway
from pollux.scheduler.munge import MungeError, MungeMissing
from pollux.slurm_job.access import TOKEN, read_access
from tests.unit.agent.scheduler.fake_gateway import (
    ATTEMPT,
    JOB,
    FakeGateway,
    Refusal,
    access,
    credential_of,
    payload_of,
    serving,
)

OLD = f"J.{JOB}.{ATTEMPT}." + "feedface" * 5


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    made = FakeGateway()
    yield made
    made.close()


@pytest.fixture
def url(gateway: FakeGateway) -> Iterator[str]:
    with serving(gateway) as address:
        yield address


@pytest.fixture(autouse=True)
def munge(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Take payloads for credentials; a test may set a fault."""

    class Stand:
        fault: Exception | None = None

        def __init__(self, socket: Path | None = None) -> None: ...

        def encode(self, payload: bytes) -> bytes:
            if Stand.fault is not None:
                raise Stand.fault
            return credential_of(payload)

    monkeypatch.setattr(credentials, "Munge", Stand)
    monkeypatch.setattr(credentials, "munge_socket", lambda: None)
    monkeypatch.setattr(credentials, "gpu_type_of", {"n1": "t4"}.__getitem__)
    return Stand


def job(url: str, token: str | None = None) -> tuple[JobGateway, Credentials]:
    made = Credentials(access(url, token=token))
    return JobGateway(Gateway([url]), made), made


def environ(url: str, **changes: str) -> dict[str, str]:
    return {
        "POLLUX_GATEWAY": url,
        "POLLUX_SUBMITTED": "1795338957",
        "SLURM_JOB_ID": str(JOB),
        "SLURM_RESTART_COUNT": str(ATTEMPT),
        **changes,
    }


def test_a_rank_without_a_token_asks_once(gateway: FakeGateway, url: str) -> None:
    line, mine = job(url)
    line.publish({"batch_size": 1})
    line.publish({"batch_size": 2})
    (credential,) = gateway.credentials
    payload = json.loads(payload_of(credential.encode()))
    assert (payload["purpose"], payload["job"], payload["attempt"]) == ("attempt", JOB, ATTEMPT)
    assert len(payload["nonce"]) == 32
    assert line.publish_interval_s == gateway.publish_interval_s
    (token,) = gateway.tokens
    assert token not in repr(mine.grant(Gateway([url])))


def test_a_refused_token_is_replaced_once(gateway: FakeGateway, url: str) -> None:
    line, _ = job(url, OLD)
    line.publish({"batch_size": 1})
    assert len(gateway.credentials) == 1
    gateway.tokens.clear()  # a database from a backup
    line.publish({"batch_size": 2})
    assert len(gateway.credentials) == 2
    gateway.refuse["/v1/report"] = Refusal(401, "token-refused")
    with pytest.raises(AccessOver):
        line.publish({"batch_size": 3})
    assert len(gateway.credentials) == 3, "no endless exchange"


def test_two_threads_with_a_refused_token_ask_for_one(gateway: FakeGateway, url: str) -> None:
    mine = Credentials(access(url, token=OLD))
    reports, orders = JobGateway(Gateway([url]), mine), JobGateway(Gateway([url]), mine)
    reports.publish({})
    orders.orders("")
    assert len(gateway.credentials) == 1


@pytest.mark.parametrize(
    ("status", "code"), [(403, "refused"), (409, "attempt-over"), (401, "token-refused"), (422, "refused")]
)
def test_a_final_refusal_of_a_token_is_final(gateway: FakeGateway, url: str, status: int, code: str) -> None:
    gateway.refuse["/v1/tokens"] = Refusal(status, code, "uid differs")
    with pytest.raises(AccessOver, match="uid differs"):
        job(url)[0].publish({})


@pytest.mark.parametrize(
    ("status", "code"), [(404, "not-known-yet"), (503, "not-known-yet"), (429, "too-often"), (500, "")]
)
def test_another_refusal_is_tried_again(gateway: FakeGateway, url: str, status: int, code: str) -> None:
    gateway.refuse["/v1/tokens"] = Refusal(status, code)
    line, _ = job(url)
    with pytest.raises(GatewayAway):
        line.publish({})
    gateway.refuse.clear()
    line.publish({})
    assert len(gateway.reports) == 1


def test_without_libmunge_there_is_no_token_and_without_munged_perhaps_later(
    gateway: FakeGateway, url: str, munge: Any
) -> None:
    line, _ = job(url)
    munge.fault = MungeError("munge: Failed to access socket")
    with pytest.raises(GatewayAway, match="socket"):
        line.publish({})
    munge.fault = MungeMissing("libmunge.so.2 is missing")
    with pytest.raises(AccessOver, match=r"libmunge\.so"):
        line.publish({})
    assert gateway.credentials == []


@pytest.mark.parametrize(
    "change",
    [
        {"token": f"J.{JOB + 1}.{ATTEMPT}." + "a" * 43},
        {"token": f"J.{JOB}.{ATTEMPT}.a\r\nX: y"},
        {"token": 5},
        {"nonce": "0" * 32},
        {"publish_interval_s": -1},
        {"publish_interval_s": float("nan")},
        {"gpu_type": "x" * 100},
    ],
)
def test_a_grant_that_makes_no_sense_is_not_used(
    gateway: FakeGateway, url: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = gateway.give_token
    monkeypatch.setattr(gateway, "give_token", lambda credential: honest(credential) | change)
    with pytest.raises(GatewayAway):
        job(url)[0].publish({})


def test_the_launcher_hands_its_token_to_the_ranks(gateway: FakeGateway, url: str) -> None:
    added, trouble = environment_of_ranks(environ(url), patience_s=0)
    assert trouble == ""
    found = read_access(environ(url) | added)
    assert found is not None
    assert found.grant is not None
    assert {found.grant.token} == gateway.tokens
    assert (found.grant.gpu_type, found.grant.publish_interval_s) == ("a100", gateway.publish_interval_s)
    JobGateway(Gateway([url]), Credentials(found)).publish({})
    assert len(gateway.credentials) == 1
    assert environment_of_ranks(environ(url) | added, patience_s=0) == (added, "")


def test_slurm_names_the_gpu_type_where_the_gateway_does_not(gateway: FakeGateway, url: str) -> None:
    gateway.gpu_type = ""
    for node, kind in (("n1", "t4"), ("", "")):
        job = environ(url, SLURMD_NODENAME=node)
        found = read_access(job | environment_of_ranks(job, patience_s=0)[0])
        assert found is not None
        assert found.grant is not None
        assert found.grant.gpu_type == kind


def test_the_launcher_of_a_plain_job_asks_nobody(gateway: FakeGateway, url: str) -> None:
    assert environment_of_ranks({"SLURM_JOB_ID": "7"}, patience_s=0) == ({}, "")
    assert environment_of_ranks(environ(url, POLLUX_GATEWAY=""), patience_s=0) == ({}, "")
    assert gateway.requests == []


def test_a_launcher_tries_every_gateway_and_says_why_there_is_no_token(url: str) -> None:
    added, trouble = environment_of_ranks(environ("http://127.0.0.1:9"), patience_s=0)
    assert added == {}
    assert "127.0.0.1:9" in trouble
    added, trouble = environment_of_ranks(environ(f"http://127.0.0.1:9, {url}"), patience_s=0)
    assert (list(added), trouble) == ([TOKEN], "")


def test_a_token_of_another_job_or_attempt_is_ignored(url: str) -> None:
    added, _ = environment_of_ranks(environ(url), patience_s=0)
    for change in ({"SLURM_JOB_ID": "8"}, {"SLURM_RESTART_COUNT": "3"}, {"SLURM_RESTART_COUNT": ""}):
        found = read_access(environ(url) | added | change)
        assert found is not None
        assert found.grant is None
    for text in ("{", "[]", "[" * 9000, json.dumps({"token": OLD + "\n"}), '"x"'):
        found = read_access(environ(url) | {TOKEN: text})
        assert found is not None
        assert found.grant is None


def test_outside_a_pollux_job_there_is_no_access() -> None:
    assert read_access({}) is None
    assert read_access({"SLURM_JOB_ID": "7", "POLLUX_GATEWAY": ""}) is None
    assert read_access({"POLLUX_GATEWAY": "http://127.0.0.1:9"}) is None
    assert read_access({"POLLUX_GATEWAY": "http://127.0.0.1:9", "SLURM_JOB_ID": "7"}) is None, "salloc"
    assert read_access(environ("http://127.0.0.1:9", SLURM_JOB_ID="seven")) is None
