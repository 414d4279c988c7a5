"""Where polluxctl of ordinary users asks, and what it answers."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from polluxd.errors import PolluxError, SlurmGarbled
from polluxd.gateway.client import NoGateway, UserClient, munge_socket, user_client

CONFIG = """\
Configuration data as of 2026-11-22T12:00:00
AuthInfo                = cred_expire=60,socket=/run/m/munge.socket
SlurmUser               = slurm(64030)
SlurmctldHost[0]        = head1(10.0.0.1)
SlurmctldHost[1]        = head2
"""


@pytest.mark.parametrize(
    ("named", "addresses"),
    [
        ("", ("https://10.0.0.1:9851", "https://head2:9851", "http://127.0.0.1:9851")),
        ("https://login:77", ("https://login:77",)),
        ("https://a:1, http://127.0.0.1:2,", ("https://a:1", "http://127.0.0.1:2")),
    ],
)
def test_the_gateways_are_on_the_controllers_unless_some_are_named(named, addresses):
    assert user_client(CONFIG, {"POLLUX_GATEWAY": named}).addresses == addresses
    assert str(munge_socket(CONFIG)) == "/run/m/munge.socket"
    assert munge_socket("AuthInfo  = (null)\n") is None


def test_settings_without_a_controller_are_refused():
    with pytest.raises(SlurmGarbled, match="SlurmctldHost"):
        user_client("nonsense", {})


class Credentials:
    """In place of munge."""

    def __init__(self):
        self.payloads = []

    def encode(self, payload):
        self.payloads.append(json.loads(payload))
        return b"MUNGE:x:"


@pytest.fixture
def gateway():
    """A server whose answers a test lists: status and document."""
    answers, asked = [], []

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            length = int(self.headers.get("Content-Length") or 0)
            sent = json.loads(self.rfile.read(length)) if length else None
            asked.append((self.path, self.headers.get("Authorization"), sent))
            status, document = answers.pop(0)
            content = json.dumps(document() if callable(document) else document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = answer  # noqa: N815 - names of the library

        def log_message(self, *_words):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", answers, asked
        server.shutdown()
        thread.join()


def error(code, message):
    return {"error": {"code": code, "message": message}}


def test_a_token_is_asked_for_once_and_again_when_it_is_over(gateway):
    url, answers, asked = gateway
    munge = Credentials()
    client = UserClient([url], "", munge)

    def token(text):
        return lambda: {"token": text, "nonce": munge.payloads[-1]["nonce"]}

    answers += [(200, token("U.1.a")), (200, [1]), (200, [2])]
    assert client.ask("/v1/jobs", ended=True) == [1]
    assert client.ask("/v1/top") == [2]
    answers += [(401, error("token-refused", "over")), (200, token("U.1.b")), (200, [3])]
    assert client.ask("/v1/top") == [3]
    assert [(path, authorization) for path, authorization, _ in asked] == [
        ("/v1/tokens", None),
        ("/v1/jobs?ended=true", "Bearer U.1.a"),
        ("/v1/top", "Bearer U.1.a"),
        ("/v1/top", "Bearer U.1.a"),
        ("/v1/tokens", None),
        ("/v1/top", "Bearer U.1.b"),
    ]
    assert munge.payloads[0]["purpose"] == "user"


def test_the_words_of_the_gateway_are_told(gateway):
    url, answers, _ = gateway
    munge = Credentials()
    client = UserClient([url], "", munge)
    answers += [
        (200, lambda: {"token": "U.1.a", "nonce": munge.payloads[-1]["nonce"]}),
        (404, error("no-answer", "job 7 is another user's: ask about your own jobs")),
    ]
    with pytest.raises(PolluxError) as caught:
        client.ask("/v1/jobs/7/explain")
    assert str(caught.value) == "job 7 is another user's: ask about your own jobs"


def test_a_token_of_another_question_is_none(gateway):
    url, answers, _ = gateway
    answers += [(200, {"token": "U.1.a", "nonce": "old"})] * 2
    with pytest.raises(NoGateway, match="another question"):
        UserClient([url], "", Credentials()).ask("/v1/top")


def test_no_gateway_says_what_to_do():
    with pytest.raises(NoGateway, match=r"start polluxd-gateway, or name its address with POLLUX_GATEWAY"):
        UserClient(["http://127.0.0.1:1"], "", Credentials()).ask("/v1/top")
