"""The HTTP endpoint: what it serves, and what hostile clients cannot do."""

from __future__ import annotations

import logging
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
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
