"""The process that keeps the store where ranks meet."""

from __future__ import annotations

import os
import signal

import pytest

from pollux.launcher.store_process import StoreProcess
from pollux.ranks.value_store import VARIABLE, Client, StoreRequest


def test_it_serves_until_its_launcher_ends_it() -> None:
    store = StoreProcess(lambda: None)
    port, _, secret = store.environment[VARIABLE].partition(":")
    client = Client("127.0.0.1", int(port), secret.encode())
    client.ask(StoreRequest("set", ("x",), b"1"))
    assert client.ask(StoreRequest("get", ("x",))).values == (b"1",)
    store.end()
    with pytest.raises(OSError, match="closed"):
        client.ask(StoreRequest("get", ("x",)))


def test_a_process_that_has_its_pid_by_now_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = StoreProcess(lambda: None)
    os.kill(store.pid, signal.SIGKILL)
    os.waitpid(store.pid, 0)  # as the launcher collects orphans
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    store.end()
    assert not killed
