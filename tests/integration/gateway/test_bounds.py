"""Hostile and broken clients cost others nothing."""

from __future__ import annotations

import json
import ssl
import threading
import time
from contextlib import ExitStack, closing, suppress

import pytest

from contrib.devcluster.processes import wait_until
from polluxd.errors import ConfigError
from polluxd.gateway.server import GatewayServer
from polluxd.gateway.visitors import Bounds
from tests.certificate import certificate
from tests.integration.gateway.serving import (
    PATIENCE_S,
    Caller,
    connect,
    document_of,
    serving,
    token_of,
    until_closed,
    user_token_of,
)
from tests.integration.store.reports import payload

pytestmark = pytest.mark.slurm

QUICK = Bounds(request_s=0.3, idle_s=PATIENCE_S)
PATIENT = Bounds(request_s=PATIENCE_S, strangers=8, strangers_of_name=6, of_token=2)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"G",
        b"GET /v1/health HTTP/1.1\r\nHost: x\r\n",
        b"POST /v1/tokens HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{",
        b"POST /v1/tokens HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    ],
)
def test_whoever_sends_no_whole_request_is_hung_up_on(records, cluster, sent):
    with serving(records, cluster=cluster, bounds=QUICK) as url, closing(connect(url)) as slow:
        slow.sendall(sent)
        until_closed(slow)


def test_whoever_sends_byte_by_byte_is_hung_up_on(records, cluster):
    """Each byte in time does not make the request in time."""
    with serving(records, cluster=cluster, bounds=QUICK) as url, closing(connect(url)) as slow:
        with suppress(ConnectionError):
            for _ in range(10_000):
                slow.sendall(b"G")
                time.sleep(0.02)
        until_closed(slow)


def test_a_second_request_of_a_known_client_is_bounded_too(records, cluster, store, seen):
    store.sync_jobs([seen(7)])
    with serving(records, cluster=cluster, bounds=QUICK) as url, closing(connect(url)) as slow:
        head = f"Host: x\r\nAuthorization: Bearer {token_of(records, 7)}\r\n"
        slow.sendall(f"GET /v1/orders HTTP/1.1\r\n{head}\r\n".encode())
        assert b" 200 " in document_of(slow)
        time.sleep(3 * QUICK.request_s)  # it may rest
        slow.sendall(f"GET /v1/orders HTTP/1.1\r\n{head}\r\n".encode())
        assert b" 200 " in document_of(slow)
        slow.sendall(b"GET ")
        until_closed(slow)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /v1/health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000,
        b"GET /" + b"a" * 100_000,
        b"GET /v1/health HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 3000 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00\xff\n\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/tokens HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v1/tokens HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n" + b"a" * 200_000,
    ],
)
def test_what_is_no_request_of_bounded_size_ends_the_connection(records, cluster, sent):
    with serving(records, cluster=cluster, bounds=QUICK) as url, closing(connect(url)) as raw:
        with suppress(ConnectionError):
            raw.sendall(sent)
        answer = until_closed(raw)
        assert b" 200 " not in answer
        assert Caller(url).ask("GET", "/v1/health")[0] == 200


def test_a_query_is_bounded_before_it_is_read(records, cluster):
    """Thousands of parameters take a hundred times as long as a question."""
    with serving(records, cluster=cluster) as url:
        user = Caller(url, user_token_of(records))
        for asking, path in (
            (Caller(url), "/v1/health?" + "a&" * 200),
            (user, "/v1/jobs?ended=" + "%20" * 200),
        ):
            status, answer = asking.ask("GET", path)
            assert (status, answer["error"]["message"]) == (422, "expected a query of at most 256 bytes")
        assert user.ask("GET", "/v1/jobs?ended=true")[0] == 200


def test_silent_strangers_give_way_the_oldest_first(records, cluster):
    with serving(records, cluster=cluster, bounds=PATIENT) as url, ExitStack() as stack:
        silent = [stack.enter_context(closing(connect(url))) for _ in range(20)]
        for each in silent:
            each.sendall(b"G")  # without a byte, the kernel keeps a connection to itself
        assert Caller(url).ask("GET", "/v1/health")[0] == 200
        until_closed(silent[0])


def test_whoever_has_shown_a_token_does_not_give_way(records, cluster, store, seen):
    store.sync_jobs([seen(7)])
    with serving(records, cluster=cluster, bounds=PATIENT) as url, ExitStack() as stack:
        job = Caller(url, token_of(records, 7))
        assert job.ask("POST", "/v1/report", payload())[0] == 204
        kept = job.connection.sock
        for _ in range(20):
            stack.enter_context(closing(connect(url))).sendall(b"G")
        assert job.ask("POST", "/v1/report", payload())[0] == 204
        assert job.connection.sock is kept


def test_a_user_with_many_jobs_leaves_others_their_connections(records, cluster, store, seen):
    jobs = range(1, 12)
    store.sync_jobs([seen(job, uid=2000 if job == 11 else 1000) for job in jobs])
    with serving(records, cluster=cluster, bounds=Bounds(request_s=PATIENCE_S, known=6)) as url:
        other = Caller(url, token_of(records, 11, uid=2000))
        assert other.ask("POST", "/v1/report", payload())[0] == 204
        kept = other.connection.sock
        many = [Caller(url, token_of(records, job)) for job in range(1, 11)]
        assert [each.ask("POST", "/v1/report", payload())[0] for each in many] == [204] * 10
        assert other.ask("POST", "/v1/report", payload())[0] == 204
        assert other.connection.sock is kept
        assert [until_closed(each.connection.sock) for each in many[:5]] == [b""] * 5


def test_one_token_is_shown_on_few_connections(records, cluster, store, seen):
    store.sync_jobs([seen(7)])
    with serving(records, cluster=cluster, bounds=PATIENT) as url:
        token = token_of(records, 7)
        callers = [Caller(url, token) for _ in range(3)]
        for each in callers:
            assert each.ask("POST", "/v1/report", payload())[0] == 204
        assert until_closed(callers[0].connection.sock) == b""
        assert callers[2].ask("POST", "/v1/report", payload())[0] == 204


def test_many_bad_tokens_of_an_address_leave_good_tokens_their_way(records, cluster, store, seen):
    """Users share addresses: a gateway that refuses an address shuts them out."""
    store.sync_jobs([seen(7)])
    with serving(records, cluster=cluster) as url:
        known, new = Caller(url, token_of(records, 7)), Caller(url, token_of(records, 7))
        assert known.ask("POST", "/v1/report", payload())[0] == 204
        flood = Caller(url)
        for number in range(200):
            flood.token = f"J.7.0.{number:043d}"
            assert flood.code("GET", "/v1/orders") == (401, "token-refused")
        assert known.ask("POST", "/v1/report", payload())[0] == 204
        assert new.ask("GET", "/v1/orders")[0] == 200


def test_the_same_bad_token_is_looked_up_once(records, cluster):
    asked = []

    class Counting:
        def __getattr__(self, name):
            return getattr(records, name)

        def token_of(self, digest):
            asked.append(digest)
            return records.token_of(digest)

    with serving(Counting(), cluster=cluster) as url:
        bad = Caller(url, "J.7.0." + "a" * 43)
        for _ in range(10):
            assert bad.code("GET", "/v1/orders") == (401, "token-refused")
    assert len(asked) == 1


def test_one_user_has_one_question_at_a_time(records, cluster):
    going, begun = threading.Event(), threading.Semaphore(0)

    class Slow:
        def jobs(self, uid, *, ended):
            begun.release()
            assert going.wait(PATIENCE_S)
            return uid

    texts = [user_token_of(records) for _ in range(2)]
    with serving(records, cluster=cluster, questions=Slow()) as url:
        answers: list[int] = []
        threads = [
            threading.Thread(target=lambda t=t: answers.append(Caller(url, t).ask("GET", "/v1/jobs")[0]))
            for t in (*texts, texts[0], texts[1], texts[0])
        ]
        for thread in threads:
            thread.start()
        assert begun.acquire(timeout=PATIENCE_S)
        wait_until(lambda: answers.count(429) >= 2, PATIENCE_S, "two refusals")
        going.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert sorted(answers) == [200, 200, 200, 429, 429]


def test_over_tls_the_agents_client_is_served_and_silent_handshakes_are_not(
    records, cluster, store, seen, tmp_path
):
    from pollux.scheduler.gateway import Gateway, GatewayAway

    store.sync_jobs([seen(7)])
    made = certificate(tmp_path / "certificate.pem", "127.0.0.1", "IP:127.0.0.1")
    files = (made, made)
    bounds = Bounds(request_s=3.0, idle_s=PATIENCE_S)
    with serving(records, cluster=cluster, bounds=bounds, tls=files) as url, closing(connect(url)) as silent:
        trusting = Gateway([url], str(files[0]))
        for _ in range(3):
            assert trusting.ask("POST", "/v1/report", payload(), token=token_of(records, 7)) is None
        trusting.close()
        with pytest.raises(GatewayAway, match=r"(?i)certificate"):
            Gateway([url]).ask("GET", "/v1/health")
        context = ssl.create_default_context(cafile=str(files[0]))
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers("ALL")
        with closing(context.wrap_socket(connect(url), server_hostname="127.0.0.1")) as old:
            assert old.version() == "TLSv1.2"
        until_closed(silent)
    assert 7 in store.reports()


def test_files_that_are_no_certificate_are_named(tmp_path):
    (tmp_path / "no.pem").write_text("nothing")
    for name in ("no.pem", "missing.pem"):
        with pytest.raises(ConfigError, match=name):
            GatewayServer(None, (tmp_path / name, tmp_path / name))


def test_a_request_of_many_small_parts_is_bounded(records, cluster):
    """Neither chunks nor trailers without end are taken in."""
    for part in (b"1\r\n \r\n", b"0\r\n", b"0\r\nA: b\r\n" + b"C: d\r\n" * 1000):
        with (
            serving(records, cluster=cluster, bounds=Bounds(request_s=PATIENCE_S)) as url,
            closing(connect(url)) as raw,
        ):
            head = b"POST /v1/tokens HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            sent = 0
            with suppress(ConnectionError):
                raw.sendall(head + part)
                while sent < 64 << 20:
                    more = part if part.startswith(b"1") else b"E: f\r\n" * 1000
                    raw.sendall(more * 100)
                    sent += 100 * len(more)
            assert sent < 64 << 20
            assert b" 200 " not in until_closed(raw)


def test_a_second_request_before_the_answer_ends_the_connection(records, cluster, store, seen):
    store.sync_jobs([seen(7)])
    with serving(records, cluster=cluster) as url, closing(connect(url)) as raw:
        token = token_of(records, 7)
        question = f"Host: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        raw.sendall(b"GET /v1/orders HTTP/1.1\r\n" + question)
        seen_last = json.loads(document_of(raw).partition(b"\r\n\r\n")[2])["seen"]
        raw.sendall(f"GET /v1/orders?seen={seen_last} HTTP/1.1\r\n".encode() + question)
        with suppress(ConnectionError):
            raw.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
        assert until_closed(raw) == b""


def test_whoever_is_refused_before_the_end_of_a_request_may_rest_and_ask_again(records, cluster):
    with serving(records, cluster=cluster, bounds=QUICK) as url, closing(connect(url)) as raw:
        head = b"POST /v1/report HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
        for _ in range(2):
            raw.sendall(head)
            assert b" 401 " in document_of(raw)
            raw.sendall(b"{}")
        assert until_closed(raw) == b""  # it rests, without a token, for request_s
