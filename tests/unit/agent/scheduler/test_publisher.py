"""The publisher against a gateway in the test's process, and against none."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pollux.scheduler.gateway import GatewayAway
from pollux.scheduler.publisher import INTRODUCTIONS, Publisher
from pollux.tuning.knowledge import Introduction
from tests.unit.agent.scheduler.fake_gateway import ATTEMPT, JOB, FakeGateway, Refusal, access, serving

SECRET = f"J.{JOB}.{ATTEMPT}." + "feedface" * 5


def ignore(_: object) -> None: ...


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    made = FakeGateway()
    made.tokens.add(SECRET)
    yield made
    made.close()


@pytest.fixture
def nobody() -> Iterator[str]:
    """Yield an address at which no process listens: a socket holds the port."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def publish() -> Iterator[Callable[..., Publisher]]:
    """Start publishers; end them after the test."""
    made: list[Publisher] = []

    def publish(
        *addresses: str, collect: Any = dict, drain: Any = ignore, resize: Any = ignore, **options: Any
    ) -> Publisher:
        made.append(Publisher(access(*addresses, token=SECRET), collect, drain, resize, **options))
        made[-1].start()
        return made[-1]

    yield publish
    for publisher in made:
        publisher.close()


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_reports_and_the_last_one_at_the_end(gateway: FakeGateway, publish: Any) -> None:
    numbers = itertools.count()
    with serving(gateway) as url:
        publisher = publish(url, collect=lambda: {"batch_size": next(numbers)}, interval_s=3600)
        eventually(lambda: gateway.reports)
        publisher.wake()
        eventually(lambda: len(gateway.reports) == 2)
        publisher.close()
        assert [report["batch_size"] for report in gateway.reports] == [0, 1, 2]
        assert publisher.ended
        assert gateway.requests.count("POST /v1/tokens") == 0, "the launcher's token serves"


def test_an_order_arrives_at_once_and_once(gateway: FakeGateway, publish: Any) -> None:
    orders: list[Any] = []
    with serving(gateway) as url:
        publish(url, drain=orders.append, resize=orders.append, interval_s=3600)
        eventually(lambda: gateway.polls > 1)
        gateway.order(drain=3)
        eventually(lambda: orders)
        assert orders == [3]
        gateway.order(resize={"id": 9, "gpus": 4})
        eventually(lambda: len(orders) == 2)
        gateway.order(resize=None, drain=None)
        eventually(lambda: len(orders) == 4)
        assert orders == [3, {"id": 9, "gpus": 4}, None, 0], "both have gone"
        assert gateway.requests.count("POST /v1/report") == 1, "no order waits for a report"


def test_an_acknowledgement_is_answered(gateway: FakeGateway, publish: Any) -> None:
    stamps = {"last_step_at": 1.0, "stopped_at": 2.0, "checkpoint_s": 0.5, "step": 40}
    with serving(gateway) as url:
        publisher = publish(url, interval_s=3600)
        assert publisher.acknowledge(3, stamps) is True
        gateway.accepts = False
        assert publisher.acknowledge(4, stamps | {"stopped_at": float("nan")}) is False
        assert gateway.acknowledged == [{"move": 3, **stamps}, {"move": 4}]


def test_an_acknowledgement_passes_without_its_stamps_where_these_are_refused(
    gateway: FakeGateway, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = gateway.answer

    def answer(method: str, path: str, query: Any, token: str, body: Any) -> Any:
        if path == "/v1/acknowledgements" and "step" in body:
            raise Refusal(422, "refused")
        return honest(method, path, query, token, body)

    monkeypatch.setattr(gateway, "answer", answer)
    with serving(gateway) as url:
        assert publish(url, interval_s=3600).acknowledge(3, {"step": -1}) is True
        assert gateway.acknowledged == [{"move": 3}]


def test_an_acknowledgement_is_repeated_until_the_gateway_is_back(gateway: FakeGateway, publish: Any) -> None:
    with serving(gateway) as url:
        publisher = publish(url, interval_s=3600)
        eventually(lambda: gateway.reports)
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(publisher.acknowledge(3, {}, timeout_s=60)))
    thread.start()
    eventually(lambda: publisher.failures > 1)
    with serving(gateway, int(url.rpartition(":")[2])):
        thread.join(60)
        assert results == [True]
        assert gateway.acknowledged == [{"move": 3}]


def test_an_order_whose_acknowledgement_found_nobody_comes_again(gateway: FakeGateway, publish: Any) -> None:
    orders: list[int] = []
    with serving(gateway) as url:
        gateway.refuse["/v1/acknowledgements"] = Refusal(503, "unavailable")
        publisher = publish(url, drain=orders.append, interval_s=3600)
        gateway.order(drain=3)
        eventually(lambda: orders == [3])
        assert publisher.acknowledge(3, {}, timeout_s=0.05) is False
        eventually(lambda: orders == [3, 3])
        gateway.refuse.clear()
        assert publisher.acknowledge(3, {}) is True
        polls = gateway.polls
        gateway.order(resize=None)
        eventually(lambda: gateway.polls > polls)
        assert orders == [3, 3]


def test_a_gateway_that_is_killed_in_the_middle_of_a_poll_loses_no_order(
    gateway: FakeGateway, publish: Any
) -> None:
    orders: list[int] = []
    with serving(gateway) as url:
        publish(url, drain=orders.append, interval_s=3600)
        eventually(lambda: gateway.polls > 1)
    gateway.order(drain=5)
    with serving(gateway, int(url.rpartition(":")[2])):
        eventually(lambda: orders == [5])


def test_the_second_of_two_gateways_takes_over(gateway: FakeGateway, publish: Any) -> None:
    orders: list[int] = []
    with serving(gateway) as second:
        with serving(gateway) as first:
            publish(first, second, drain=orders.append)
            eventually(lambda: gateway.reports and gateway.polls > 1)
        gateway.order(drain=6)
        before = len(gateway.reports)
        eventually(lambda: len(gateway.reports) > before + 2 and orders)
        assert orders == [6]


def test_a_superseded_poll_is_made_again(gateway: FakeGateway, publish: Any) -> None:
    orders: list[int] = []
    gateway.refuse["/v1/orders"] = Refusal(409, "superseded")
    with serving(gateway) as url:
        publish(url, drain=orders.append)
        eventually(lambda: gateway.requests.count("GET /v1/orders") > 1)
        gateway.refuse.clear()
        gateway.order(drain=1)
        eventually(lambda: orders == [1])


def test_an_attempt_that_is_over_ends_the_reports(
    gateway: FakeGateway, publish: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.refuse["/v1/report"] = Refusal(409, "attempt-over", "a later attempt runs")
    with serving(gateway) as url:
        publisher = publish(url)
        eventually(lambda: publisher.ended)
        assert "a later attempt runs" in caplog.text
        assert SECRET not in caplog.text
        assert publisher.acknowledge(1, {}) is False


def test_a_refused_report_costs_neither_orders_nor_the_next_report(
    gateway: FakeGateway, publish: Any, caplog: pytest.LogCaptureFixture
) -> None:
    orders: list[int] = []
    gateway.refuse["/v1/report"] = Refusal(422, "refused", "grad_sqr is negative")
    with serving(gateway) as url:
        publisher = publish(url, drain=orders.append)
        eventually(lambda: gateway.requests.count("POST /v1/report") > 2)
        assert caplog.text.count("grad_sqr is negative") == 1
        gateway.order(drain=2)
        eventually(lambda: orders == [2])
        assert publisher.acknowledge(2, {}) is True
        gateway.refuse.clear()
        eventually(lambda: gateway.reports)


def test_measurements_that_fail_stop_neither_orders_nor_acknowledgements(
    gateway: FakeGateway, publish: Any
) -> None:
    def broken() -> dict[str, Any]:
        raise ValueError("no fit")

    orders: list[int] = []
    with serving(gateway) as url:
        publisher = publish(url, collect=broken, drain=orders.append)
        gateway.order(drain=2)
        eventually(lambda: orders == [2])
        assert publisher.acknowledge(2, {}) is True
        assert gateway.reports == []


def test_an_introduction_is_made_once(gateway: FakeGateway, publish: Any) -> None:
    gateway.prior = {"rows": []}
    learned: list[Any] = []
    with serving(gateway) as url:
        publish(url, introduction=Introduction("0" * 32, "a100", learned.append))
        eventually(lambda: len(gateway.reports) > 2)
        assert gateway.introduced == [{"fingerprint": "0" * 32, "gpu_type": "a100"}]
        assert learned == [{"rows": []}]


def test_without_a_gateway_training_goes_on_and_the_log_says_it_once(
    nobody: str, publish: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    publisher = publish(nobody, interval_s=0.01)
    eventually(lambda: publisher.failures > 3)
    assert publisher.acknowledge(1, {}, timeout_s=0.05) is False
    publisher.close()
    assert caplog.text.count("cannot be reached") == 1
    assert SECRET not in caplog.text
    assert publisher.ended


def test_a_server_that_says_nothing_holds_neither_training_nor_its_end(publish: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        publisher = publish(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert publisher.acknowledge(1, {}, timeout_s=0.05) is False
        publisher.close(timeout_s=0.05)


def test_closing_before_the_start_and_twice_is_harmless(nobody: str) -> None:
    publisher = Publisher(access(nobody, token=SECRET), dict, ignore, ignore)
    publisher.close()
    publisher.close()
    assert publisher.acknowledge(1, {}, timeout_s=0.05) is False


def test_an_introduction_that_reaches_nobody_is_given_up_and_reports_go_on(nobody: str) -> None:
    learned: list[Any] = []
    publisher = Publisher(
        access(nobody, token=SECRET),
        dict,
        ignore,
        ignore,
        introduction=Introduction("0" * 32, "", learned.append),
    )
    for _ in range(INTRODUCTIONS):
        assert publisher.introduction is not None
        with pytest.raises(GatewayAway):
            publisher.exchange()
    assert publisher.introduction is None
    assert learned == []
    with pytest.raises(GatewayAway):
        publisher.exchange()


def test_hours_without_a_gateway_cost_no_memory_and_no_step(nobody: str) -> None:
    """Run 600 rounds; with back-off, an hour has about 70 of them."""
    made: list[None] = []

    def collect() -> dict[str, Any]:
        made.append(None)
        return {"batch_size": len(made), "ballast": "x" * 10_000}

    publisher = Publisher(access(nobody, token=SECRET), collect, ignore, ignore, interval_s=1.0)

    def rounds(count: int) -> None:
        for _ in range(count):
            with contextlib.suppress(GatewayAway):
                publisher.exchange()
            publisher.failures += 1
            assert publisher.pause() <= 66

    rounds(100)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    rounds(500)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(made) == 600
    assert grown < 100_000  # a report has ten thousand
    publisher.close()


def test_backoff_grows_and_is_bounded(nobody: str) -> None:
    publisher = Publisher(access(nobody, token=SECRET), dict, ignore, ignore, interval_s=30.0)
    pauses = []
    for publisher.failures in range(1, 12):
        pauses.append(publisher.pause())
    assert pauses[0] < 1.2
    assert all(later > earlier for earlier, later in itertools.pairwise(pauses[:6]))
    assert max(pauses) <= 66
