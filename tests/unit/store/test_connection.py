"""Database errors as ours, and no password in any of them."""

from __future__ import annotations

import socket

import psycopg2
import pytest
import sqlalchemy.exc

from polluxd.errors import ConfigError, LeaderLost, StoreRejected, StoreUnavailable
from polluxd.store import Store
from polluxd.store.connection import our_errors, translated


class Answered(psycopg2.Error):
    """A server's error with a SQLSTATE that a test can set.

    psycopg2's own class does not let a test set the SQLSTATE.
    """

    def __init__(self, code):
        super().__init__("text")
        self._code = code

    @property
    def pgcode(self):
        return self._code


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        *(("PX001", LeaderLost), ("PX409", StoreRejected)),
        *(("57014", StoreUnavailable), ("57P01", StoreUnavailable), ("40P01", StoreUnavailable)),
        *(("53300", StoreUnavailable), ("08006", StoreUnavailable), ("55P03", StoreUnavailable)),
        *(("42501", StoreRejected), ("23505", StoreRejected), ("42P01", StoreRejected)),
    ],
)
def test_each_class_of_error_has_its_meaning(code, kind):
    assert type(translated(Answered(code), "db")) is kind


def test_a_wrapped_error_and_a_lost_connection():
    lost = psycopg2.OperationalError("server closed the connection unexpectedly")
    for error in (lost, sqlalchemy.exc.DBAPIError("SELECT", {}, lost), sqlalchemy.exc.TimeoutError("pool")):
        with pytest.raises(StoreUnavailable, match="db"), our_errors("db"):
            raise error


@pytest.mark.parametrize("url", ["mysql://u:hunter2@h/x", "u:hunter2@h", ""])
def test_a_url_of_something_else_is_refused_without_repeating_it(url):
    with pytest.raises(ConfigError, match="postgresql://") as caught:
        Store(url, "c")
    assert "hunter2" not in str(caught.value)


def test_a_server_that_accepts_and_says_nothing_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = Store(
            f"postgresql://u:hunter2@127.0.0.1:{silent.getsockname()[1]}/x", "c", connect_timeout=0.2
        )
        with pytest.raises(StoreUnavailable, match="no answer") as caught:
            store.settings()
        assert "hunter2" not in str(caught.value)
        store.close()


def test_waking_ends_a_wait_without_a_database():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store = Store(f"postgresql://u@127.0.0.1:{port}/x", "c", connect_timeout=0.2)
    store.wake()
    assert store.wait(60, for_news=True) is True
    assert store.wait(0, for_news=True) is False
    store.close()
