"""The HTTP endpoint: what it serves, and what hostile clients cannot do."""

from __future__ import annotations

import contextlib
import logging
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from contrib.devcluster.processes import free_ports
from polluxd.daemon import Daemon
from polluxd.errors import ConfigError
from polluxd.metrics import Metrics
from polluxd.metrics.endpoint import CONNECTIONS, Endpoint
from tests.build import config


def free_port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def serving() -> Iterator[Endpoint]:
    made = Endpoint(Metrics("1.2.3").registry)
    made.listen(f"127.0.0.1:{free_port()}")
    yield made
    made.close()


def scrape(port: int | None) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return [family.name for family in text_string_to_metric_families(answer.read().decode())]


def test_prometheus_own_parser_reads_every_metric(serving: Endpoint) -> None:
    assert {"polluxd_build_info", "polluxd_cycles", "polluxd_moves"} <= set(scrape(serving.port))


def test_silent_clients_keep_nobody_out(serving: Endpoint) -> None:
    address = ("127.0.0.1", serving.port)
    silent = [socket.create_connection(address) for _ in range(CONNECTIONS)]
    for client in silent:
        client.sendall(b"GET /metrics HTTP/1.1\r\n")  # and no more of the request
    assert "polluxd_build_info" in scrape(serving.port)
    for client in silent:
        client.settimeout(20)
        assert client.recv(1) == b""  # hung up on: the oldest at once, the others when their time is over
        client.close()


class Page:
    """A page of a megabyte, which no buffer of a socket holds."""

    made = 0

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self.made += 1
        family = GaugeMetricFamily("page", "x", labels=["n"])
        for number in range(10_000):
            family.add_metric([f"{number:0100}"], 1.0)
        yield family


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Page, int]]:
    monkeypatch.setattr("polluxd.metrics.endpoint.FRESH_S", 3600.0)
    registry, made = CollectorRegistry(), Page()
    registry.register(made)
    made.made = 0
    endpoint = Endpoint(registry)
    endpoint.listen(f"127.0.0.1:{free_port()}")
    yield made, endpoint.port or 0
    endpoint.close()


def test_clients_that_do_not_read_keep_nobody_out_and_cost_one_page(page: tuple[Page, int]) -> None:
    made, port = page
    slow = [socket.socket() for _ in range(CONNECTIONS + 1)]
    for client in slow:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert scrape(port) == ["page"]
    assert made.made == 1
    for client in slow:
        client.close()


@pytest.mark.parametrize("sent", [b"POST / HTTP/1.1\r\n\r\n", b"x" * 20_000, b"\0", b"\r\n\r\n"])
def test_what_is_no_request_gets_no_page(page: tuple[Page, int], sent: bytes) -> None:
    made, port = page
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(sent)
        with contextlib.suppress(ConnectionError):
            assert client.recv(65536)[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 405")
    assert made.made == 0


def test_another_address_and_an_empty_one_end_the_old_one(serving: Endpoint) -> None:
    first, second = serving.port, free_port()
    serving.listen(f"127.0.0.1:{second}")
    assert serving.port == second
    assert "polluxd_build_info" in scrape(second)
    serving.listen("")
    assert serving.port is None
    for port in (first, second):
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port or 0), timeout=20)


def test_a_taken_address_is_logged_once_and_tried_again(
    serving: Endpoint, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    listen = f"127.0.0.1:{serving.port}"
    daemon = Daemon(lambda: config(metrics={"listen": listen}))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            daemon.serve_metrics()
        warnings = [r.message for r in caplog.records if "no metrics" in r.message]
        assert len(warnings) == 1
        assert listen in warnings[0]
    serving.close()
    daemon.serve_metrics()
    assert "polluxd_is_leader" in scrape(daemon.endpoint.port)
    daemon.endpoint.close()
    daemon.store.close()


@pytest.mark.parametrize(
    "listen", ["9850", "127.0.0.1", "127.0.0.1:", ":9850", "host:0", "host:70000", "host:x"]
)
def test_an_address_that_is_none_is_refused_by_name(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"metrics.listen: expected HOST:PORT"):
        config(metrics={"listen": listen})
