"""What attempts say to a gateway, over HTTP, and what it answers."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from urllib.parse import quote

import pytest

from polluxd.errors import StoreRejected, StoreUnavailable
from polluxd.gateway import order_watch
from polluxd.gateway.budgets import Pace
from polluxd.gateway.payloads import ReportMessage
from polluxd.model import JobState, Placement, Step
from tests.integration.gateway.serving import (
    PATIENCE_S,
    Caller,
    connect,
    serving,
    token_of,
    until_closed,
    user_token_of,
)
from tests.integration.store.reports import payload

pytestmark = pytest.mark.slurm

N1, N2 = Placement(("n1",), 2), Placement(("n2",), 2)


def drain(store, job_id, attempt=0):
    store.lead()
    move = store.plan_move(job_id, attempt, "requeue", N1, N2, "x", store.epoch)
    assert store.advance(move.id, Step.DRAINING, time.time(), epoch=store.epoch)
    return move


def test_a_report_is_stored(caller, store):
    job = caller(7)
    assert job.ask("POST", "/v1/report", payload(batch_size=64)) == (204, None)
    assert store.reports()[7].batch_size == 64
    assert job.ask("POST", "/v1/report", payload(batch_size=128)) == (204, None)
    assert [point.batch_size for point in store.report_history(7)] == [64, 128]


def test_a_question_is_answered_when_its_orders_change(caller, store):
    job = caller(7)
    status, first = job.ask("GET", "/v1/orders")
    assert (status, first["drain"], first["resize"]) == (200, None, None)
    answers = []
    waiting = threading.Thread(
        target=lambda: answers.append(job.ask("GET", f"/v1/orders?seen={first['seen']}"))
    )
    waiting.start()
    move = drain(store, 7)
    waiting.join(PATIENCE_S)
    ((status, second),) = answers
    assert (status, second["drain"]) == (200, move.id)
    assert second["seen"] != first["seen"]
    assert job.ask("POST", "/v1/acknowledgements", {"move": move.id, "step": 3}) == (200, {"accepted": True})
    assert job.ask("GET", "/v1/orders")[1] == second, "a drain stands until its move ends"
    answers.clear()
    waiting = threading.Thread(
        target=lambda: answers.append(job.ask("GET", f"/v1/orders?seen={second['seen']}"))
    )
    waiting.start()
    assert store.advance(move.id, Step.FAILED, time.time(), epoch=store.epoch)
    waiting.join(PATIENCE_S)
    assert answers == [(200, first)]


def test_orders_are_for_one_attempt_of_one_job(caller, store):
    mine, other = caller(7), caller(8)
    move = drain(store, 7)
    assert mine.ask("GET", "/v1/orders")[1]["drain"] == move.id
    assert other.ask("GET", "/v1/orders")[1]["drain"] is None


def test_an_unchanged_question_ends_with_the_same_answer(caller, monkeypatch):
    monkeypatch.setattr(order_watch, "LONGEST_S", 0.3)
    job = caller(7)
    first = job.ask("GET", "/v1/orders")
    assert job.ask("GET", f"/v1/orders?seen={first[1]['seen']}") == first


def test_a_newer_question_ends_the_older_one(caller, url):
    job = caller(7)
    seen = job.ask("GET", "/v1/orders")[1]["seen"]
    answers = []
    older = threading.Thread(target=lambda: answers.append(job.code("GET", f"/v1/orders?seen={seen}")))
    older.start()
    newer = Caller(url, job.token)
    until = time.monotonic() + PATIENCE_S
    while older.is_alive():
        assert time.monotonic() < until
        # Where the thread was slow, its question came later than the first one of these.
        assert newer.ask("GET", "/v1/orders?seen=another")[0] in (200, 409)
    assert answers == [(409, "superseded")]


def test_an_acknowledgement_may_be_repeated_and_is_of_ones_own_move(caller, store):
    mine, other = caller(7), caller(8, uid=1001)
    move = drain(store, 7)
    said = {"move": move.id, "last_step_at": time.time(), "stopped_at": None, "checkpoint_s": 0.5, "step": 12}
    assert other.ask("POST", "/v1/acknowledgements", said) == (200, {"accepted": False})
    for _ in range(2):
        assert mine.ask("POST", "/v1/acknowledgements", said) == (200, {"accepted": True})
    store.take_in()
    assert store.open_moves()[0].step is Step.CHECKPOINTED


def test_earlier_fits_of_a_training_are_told(caller, store):
    runs = {"fingerprint": "ab" * 16, "gpu_type": "t4"}
    assert caller(7).ask("POST", "/v1/training", runs) == (200, {"prior": None})
    assert caller(7).ask("POST", "/v1/report", payload(gpu_type="t4"))[0] == 204
    store.remember_fits()
    status, answer = caller(8).ask("POST", "/v1/training", runs)
    assert (status, answer["prior"]["explored_gpus"]) == (200, 4)
    assert set(answer["prior"]["params"]) == {
        *("alpha_grad", "beta_grad", "alpha_local", "beta_local", "alpha_node", "beta_node", "gamma")
    }
    assert caller(9, uid=1001).ask("POST", "/v1/training", runs) == (200, {"prior": None})


def test_a_token_dies_with_its_attempt_and_its_job(caller, store, seen, url, records):
    job = caller(7)
    assert job.ask("POST", "/v1/report", payload())[0] == 204
    store.sync_jobs([seen(7, restart_count=1)])
    for method, path, document in (
        ("POST", "/v1/report", payload()),
        ("POST", "/v1/acknowledgements", {"move": 1}),
        ("POST", "/v1/training", {"fingerprint": "ab" * 16}),
    ):
        assert job.code(method, path, document) == (409, "attempt-over")
    later = Caller(url, token_of(records, 7, attempt=1))
    assert later.ask("POST", "/v1/report", payload())[0] == 204
    store.sync_jobs([seen(7, restart_count=1, state=JobState.COMPLETED, end_time=time.time())])
    assert later.code("POST", "/v1/report", payload()) == (409, "attempt-over")
    # Another gateway, which remembers nothing.
    with serving(records, cluster=records.cluster) as fresh:
        for token in (job.token, later.token):
            assert Caller(fresh, token).code("GET", "/v1/orders") == (409, "attempt-over")
    assert len(store.report_history(7)) == 2


def test_a_job_that_polluxd_forgot_is_not_known_yet(caller, postgres, cluster):
    job = caller(7)
    postgres.execute(f"DELETE FROM pollux.job WHERE cluster = '{cluster}'")
    assert job.code("POST", "/v1/report", payload()) == (503, "not-known-yet")


def test_what_no_token_opens(caller, url, records, cluster):
    job = caller(7)
    stolen = job.token
    for token in (
        "",
        "x",
        "J.7.0." + "a" * 43,
        stolen[:-1] + ("a" if stolen[-1] != "a" else "b"),
        stolen.replace("J.7.0.", "J.8.0."),
        stolen.replace("J.7.0.", "J.7.1."),
        stolen + "x",
        "U.1000." + "a" * 43,
    ):
        assert Caller(url, token).code("POST", "/v1/report", payload()) == (401, "token-refused")
    assert job.code("GET", "/v1/jobs") == (401, "token-refused")
    assert Caller(url).ask("GET", "/v1/health")[1]["database"] is True


def test_a_users_token_opens_questions_alone(caller, records, url):
    user = Caller(url, user_token_of(records))
    assert user.ask("GET", "/v1/jobs?ended=true") == (200, [1000, True])
    assert user.ask("GET", "/v1/top") == (200, 1000)
    assert user.ask("GET", "/v1/cluster") == (200, 1000)
    assert user.ask("GET", "/v1/jobs/12/explain") == (200, [1000, 12])
    assert user.ask("GET", "/v1/jobs/12/history?since=1.5") == (200, [1000, 12, 1.5])
    for method, path in (("POST", "/v1/report"), ("GET", "/v1/orders"), ("POST", "/v1/acknowledgements")):
        assert user.code(method, path, {}) == (401, "token-refused")
    for job in ("x", "-1", "1.5", "%31%32x", "١٢", str(2**32), "9" * 5000):
        for what in ("explain", "history"):
            assert user.code("GET", quote(f"/v1/jobs/{job}/{what}", safe="/%")) == (422, "refused")
    for path in ("/v1/jobs?ended=perhaps", "/v1/jobs?more=1"):
        assert user.code("GET", path) == (422, "refused")
    for path in ("/v2/jobs", "/", "/v1/jobs/"):
        assert user.code("GET", path) == (404, "no-such-path")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b"[" * 7_000,
        b'{"at": 1e400}',
        b"null",
        json.dumps(payload() | {"unknown": 1}).encode(),
        json.dumps(payload() | {"times": {"made_up_at": 1}}).encode(),
        json.dumps(payload(goodput=424242)).replace("424242", "NaN").encode(),
        json.dumps(payload(goodput=424242)).replace("424242", "-Infinity").encode(),
        json.dumps(payload(gpu_type="a\u0000b")).encode(),
        json.dumps(payload(gpu_type="x" * 65)).encode(),
    ],
)
def test_what_is_no_report_is_refused_and_the_next_one_counts(caller, store, body):
    job = caller(7)
    assert job.code("POST", "/v1/report", body=body) == (422, "refused")
    assert store.reports() == {}
    assert job.ask("POST", "/v1/report", payload())[0] == 204


@pytest.mark.parametrize(
    ("method", "path"),
    [(each, "/v1/jobs") for each in ("TRACE", "DELETE", "PUT", "OPTIONS", "PATCH", "POST")]
    + [("GET", "/v1/report"), ("GET", "/"), ("GET", "/v1/jobs/7"), ("GET", "/v1/jobs/7/explain/")],
)
def test_each_request_without_a_token_has_a_pace(url, monkeypatch, method, path):
    waited, wait = [], Pace.wait
    monkeypatch.setattr(Pace, "wait", lambda pace, name: waited.append(name) or wait(pace, name))
    assert Caller(url).code(method, path) == (404, "no-such-path")
    assert len(waited) == 1


def chunked(body):
    return {"transfer-encoding": "chunked"}, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def whole(body):
    return {"content-length": len(body)}, body


def announced_small(body):
    return {"content-length": 10, "x": "y" * 9000}, body


@pytest.mark.parametrize("form", [whole, chunked, announced_small])
@pytest.mark.parametrize("padding", [9_000, 20_000, 200_000])
def test_nothing_is_parsed_of_more_than_8_kib(caller, store, url, monkeypatch, form, padding):
    parsed = []
    monkeypatch.setattr(ReportMessage, "model_validate_json", parsed.append)
    job = caller(7)
    headers, body = form(json.dumps(payload()).encode() + b" " * padding)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST /v1/report HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {job.token}\r\n{lines}\r\n"
    with connect(url) as raw:
        with suppress(ConnectionError):  # the gateway reads no more
            raw.sendall(head.encode() + body)
        answer = until_closed(raw)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "refused"
    assert (parsed, store.reports()) == ([], {})
    monkeypatch.undo()
    assert job.ask("POST", "/v1/report", payload())[0] == 204


def test_a_fault_is_named_without_its_value(caller):
    job = caller(7)
    _, answer = job.ask("POST", "/v1/report", payload(gpu_type="feedface" * 20))
    assert "gpu_type" in answer["error"]["message"]
    assert "feedface" not in answer["error"]["message"]


def test_too_many_reports_are_refused(caller):
    job = caller(7)
    codes = set()
    for _ in range(400):
        status, answer = job.ask("POST", "/v1/report", payload())
        if status != 204:
            codes.add((status, answer["error"]["code"]))
            break
    assert codes == {(429, "too-often")}


def test_two_gateways_serve_the_same_attempt(caller, store, records, cluster):
    job = caller(7)
    with serving(records, cluster=cluster) as second:
        other = Caller(second, job.token)
        assert job.ask("POST", "/v1/report", payload(batch_size=64))[0] == 204
        assert other.ask("POST", "/v1/report", payload(batch_size=128))[0] == 204
        move = drain(store, 7)
        for each in (job, other):
            assert each.ask("GET", "/v1/orders")[1]["drain"] == move.id
        for each in (other, job):
            assert each.ask("POST", "/v1/acknowledgements", {"move": move.id})[1] == {"accepted": True}
        assert store.advance(move.id, Step.FAILED, time.time(), epoch=store.epoch)
        assert other.ask("GET", "/v1/orders")[1]["drain"] is None
    assert job.ask("POST", "/v1/report", payload())[0] == 204
    assert len(store.report_history(7)) == 3


def test_a_fault_of_the_gateway_costs_that_answer_alone(store, records, cluster, seen, caplog):
    store.sync_jobs([seen(7)])

    class Faulty:
        def __getattr__(self, name):
            return getattr(records, name)

        def store_reports(self, reports):
            if any(report.document["goodput"] == 13.0 for report in reports):
                raise StoreRejected("a row that Postgres refuses")
            return records.store_reports(reports)

        def introduce(self, *_words):
            raise ZeroDivisionError("secret detail")

        def acknowledge(self, *_words):
            raise StoreUnavailable("password of pollux_gateway")

    with serving(Faulty(), cluster=cluster) as url:
        job = Caller(url, token_of(records, 7))
        status, answer = job.ask("POST", "/v1/training", {"fingerprint": "ab" * 16})
        assert (status, answer["error"]["code"]) == (500, "fault")
        assert "secret" not in json.dumps(answer)
        status, answer = job.ask("POST", "/v1/acknowledgements", {"move": 1})
        assert (status, answer["error"]["code"]) == (503, "unavailable")
        assert "password" not in json.dumps(answer)
        # Reports that come together are stored together: one that is refused costs no other one.
        callers = [Caller(url, token_of(records, 7)) for _ in range(4)]
        threads = [
            threading.Thread(target=each.ask, args=("POST", "/v1/report", payload(goodput=goodput)))
            for each, goodput in zip(callers, (1.0, 13.0, 2.0, 3.0), strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert sorted(point.goodput for point in store.report_history(7)) == [1.0, 2.0, 3.0]
    assert "secret detail" in caplog.text
