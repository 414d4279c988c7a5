"""The ticket, and a publisher without its database.

tests/integration/store tests the publisher with a database.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import os
import signal
import socket
import threading
import time
import tracemalloc

import pytest

from pollux.scheduler.database import DatabaseAway
from pollux.scheduler.orders import DrainOrder
from pollux.scheduler.publisher import INTRODUCTIONS, Publisher
from pollux.slurm_job.ticket import Ticket, read_ticket
from pollux.tuning.knowledge import Introduction

TICKET = {
    **{"cluster": "c", "job_id": 7, "attempt": 0, "uid": os.getuid(), "token": "ab" * 32},
    **{"dsn": "host=127.0.0.1 password=hunter2", "publish_interval_s": 30},
}


@pytest.fixture
def write(tmp_path):
    """Write a ticket; return the environment of a process that finds it."""

    def write(document=None, *, text=None, mode=0o600, **changes):
        path = tmp_path / "7.n1.json"
        path.write_text(json.dumps({**TICKET, **(document or {})}) if text is None else text)
        path.chmod(mode)
        return {
            "POLLUX_TICKET_DIR": str(tmp_path),
            "SLURM_JOB_ID": "7",
            "SLURMD_NODENAME": "n1",
            **changes,
        }

    return write


def test_a_ticket_is_read_and_shows_no_secret(write):
    ticket = read_ticket(write())
    assert (ticket.job_id, ticket.attempt, ticket.publish_interval_s) == (7, 0, 30.0)
    assert "hunter2" not in repr(ticket)
    assert ticket.token not in repr(ticket)


def test_a_ticket_may_name_the_gpu_type(write):
    assert read_ticket(write()).gpu_type == ""
    assert read_ticket(write({"gpu_type": "a100"})).gpu_type == "a100"
    assert read_ticket(write({"gpu_type": 3})) is None


def test_a_restarted_job_has_the_ticket_of_its_attempt(write):
    assert read_ticket(write({"attempt": 2}, SLURM_RESTART_COUNT="2")).attempt == 2
    assert read_ticket(write({"attempt": 1}, SLURM_RESTART_COUNT="2")) is None


@pytest.mark.parametrize("name", ["POLLUX_TICKET_DIR", "SLURM_JOB_ID", "SLURMD_NODENAME"])
def test_outside_a_pollux_job_there_is_none_and_nothing_is_said(write, caplog, name):
    environ = write()
    del environ[name]
    assert read_ticket(environ) is None
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mode": 0o644}, "mode 0600"),
        ({"text": "{"}, "not JSON"),
        ({"text": "[]"}, "JSON object"),
        ({"text": "x" * 70000}, "bytes"),
        ({"document": {"job_id": 8}}, "job 8"),
        ({"document": {"token": 5}}, "token"),
        ({"document": {"attempt": True}}, "attempt"),
        ({"document": {"publish_interval_s": 0}}, "publish_interval_s"),
        ({"text": json.dumps({**TICKET, "publish_interval_s": float("nan")})}, "publish_interval_s"),
        ({"SLURM_RESTART_COUNT": "many"}, "many"),
    ],
)
def test_an_unusable_ticket_counts_as_none_and_is_told_without_its_secrets(write, caplog, options, told):
    assert read_ticket(write(**options)) is None
    assert told in caplog.text
    assert "hunter2" not in caplog.text


def test_a_link_or_a_pipe_in_its_place_is_not_followed(write, tmp_path, caplog):
    environ = write()
    path = tmp_path / "7.n1.json"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert read_ticket(environ) is None
    path.unlink()
    os.mkfifo(path, 0o600)
    assert read_ticket(environ) is None
    assert "regular file" in caplog.text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_ticket_of_another_user_is_refused(write, tmp_path, caplog):
    environ = write()
    os.chown(tmp_path / "7.n1.json", 4242, -1)
    assert read_ticket(environ) is None
    assert "uid 4242" in caplog.text


def ticket(dsn, interval=0.01):
    return Ticket("c", 7, 0, 1000, "feedface" * 8, dsn, interval)


@pytest.fixture
def nobody():
    """Yield a dsn at which no process listens: a socket holds the port."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"host=127.0.0.1 port={held.getsockname()[1]} user=u dbname=d password=hunter2"


def eventually(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_without_a_database_training_goes_on_and_the_log_says_it_once(nobody, caplog):
    caplog.set_level(logging.INFO)
    publisher = Publisher(ticket(nobody), dict, lambda number: None)
    publisher.start()
    eventually(lambda: publisher.failures > 3)
    assert publisher.acknowledge(1, {}, timeout_s=0.05) is False
    publisher.close()
    assert caplog.text.count("cannot be reached") == 1
    assert "hunter2" not in caplog.text
    assert publisher.ended


def test_a_server_that_says_nothing_holds_neither_training_nor_its_end():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dsn = f"host=127.0.0.1 port={silent.getsockname()[1]} user=u dbname=d"
        publisher = Publisher(ticket(dsn), dict, lambda number: None)
        publisher.start()
        assert publisher.acknowledge(1, {}, timeout_s=0.05) is False
        publisher.close(timeout_s=0.05)


def test_a_dsn_that_is_none_ends_the_reports_without_repeating_it(caplog):
    publisher = Publisher(ticket("hunter2 is no dsn"), dict, lambda number: None)
    publisher.start()
    eventually(lambda: publisher.ended)
    assert "not a libpq connection string" in caplog.text
    assert "hunter2" not in caplog.text
    assert publisher.acknowledge(1, {}) is False


def test_waking_from_a_signal_handler_never_blocks(nobody):
    publisher = Publisher(ticket(nobody, 3600), dict, lambda number: None)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: publisher.wake())
    try:
        publisher.start()
        for _ in range(100_000 // 50):
            os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(70_000):  # more than a pipe holds
            publisher.wake()
        eventually(lambda: publisher.failures > 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
        publisher.close()


def test_an_order_whose_acknowledgement_nobody_heard_comes_again(nobody):
    orders = []
    publisher = Publisher(ticket(nobody), dict, orders.append)
    publisher.take_orders({"drain": 3})
    publisher.take_orders({"drain": 3})
    assert orders == [DrainOrder(3)]
    publisher.start()
    assert publisher.acknowledge(3, {}, timeout_s=0.05) is False
    publisher.close()
    publisher.take_orders({"drain": 3})
    assert orders == [DrainOrder(3), DrainOrder(3)]


def test_closing_before_the_start_and_twice_is_harmless(nobody):
    publisher = Publisher(ticket(nobody), dict, lambda number: None)
    publisher.close()
    publisher.close()
    assert publisher.acknowledge(1, {}) is False


def test_an_introduction_that_nobody_hears_is_given_up_and_reports_go_on(nobody):
    heard = []
    publisher = Publisher(
        ticket(nobody), dict, lambda number: None, introduction=Introduction("0" * 32, "", heard.append)
    )
    for _ in range(INTRODUCTIONS):
        assert publisher.introduction is not None
        with pytest.raises(DatabaseAway):
            publisher.exchange()
    assert publisher.introduction is None
    assert heard == []
    with pytest.raises(DatabaseAway):
        publisher.exchange()


def test_an_hour_without_a_database_costs_no_memory_and_no_step(nobody):
    """Run 600 rounds; with back-off, an hour has about 70 of them."""
    made = []

    def collect():
        made.append(None)
        return {"batch_size": len(made), "ballast": "x" * 10_000}

    publisher = Publisher(ticket(nobody), collect, lambda number: None, interval_s=1.0)

    def rounds(count):
        for _ in range(count):
            with contextlib.suppress(DatabaseAway):
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


def test_backoff_grows_and_is_bounded(nobody):
    publisher = Publisher(ticket(nobody, 30.0), dict, lambda number: None)
    pauses = []
    for publisher.failures in range(1, 12):
        pauses.append(publisher.pause())
    assert pauses[0] < 1.2
    assert all(later > earlier for earlier, later in itertools.pairwise(pauses[:6]))
    assert max(pauses) <= 66
    assert threading.active_count() < 50
