"""Attacks by transactions that outlive what polluxd can end."""

from __future__ import annotations

from contextlib import nullcontext

from contrib.attack.database import hold, sessions
from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Site

NAME = "of-mallory"


def _restarted(site: Site, statement: str) -> None:
    """Change a setting that Postgres reads at its start."""
    site.query(statement)
    site.cluster.stop_postgres()
    site.cluster.start_postgres()
    site.until(lambda: site.publish("mallory").ok, "mallory's next report")


@attack("mallory", "further: a prepared transaction, which outlives its session, stops vacuum without end")
def prepared_transaction(site: Site, defended: bool) -> Outcome:
    """The server's default, max_prepared_transactions = 0, refuses it."""
    site.ticket("mallory")
    if not defended:
        _restarted(site, "ALTER SYSTEM SET max_prepared_transactions = 5")
    answers = site.sql("mallory", "BEGIN", "SELECT txid_current()", f"PREPARE TRANSACTION '{NAME}'")
    left = site.query("SELECT gid FROM pg_prepared_xacts")
    if left:
        site.query(f"ROLLBACK PREPARED '{NAME}'")
    if not defended:
        _restarted(site, "ALTER SYSTEM RESET max_prepared_transactions")
    site.until(lambda: site.publish("alice").ok, "alice's next report")
    return Outcome(bool(left), f"prepared transactions that are left: {left}; {answers[-1].text[:160]}")


@attack(
    "mallory", "further: a listener in an open transaction lets a flood of NOTIFY fill the server's queue"
)
def notification_queue(site: Site, defended: bool) -> Outcome:
    """A full queue refuses every report that wakes polluxd."""
    flood = "SELECT count(pg_notify('mallory', g || repeat('x', 7000))) FROM generate_series(1, 1000) g"
    empty = ("WHERE s.xact_start <", "WHERE false AND s.xact_start <")
    site.resident("alice")
    with nullcontext() if defended else site.rewritten("pollux_roles.end_sessions(double precision)", empty):
        # The LISTEN counts from its commit on; the transaction after it keeps the queue's tail where it is.
        hold(site, "COMMIT", "LISTEN mallory", "BEGIN", "SELECT txid_current()")
        said = [answer.text for answer in site.sql("mallory", flood)]

        def used() -> float:
            return float(site.query("SELECT pg_notification_queue_usage()")[0][0])

        filled = used()
        if defended:
            site.until(lambda: not sessions(site), "the end of mallory's session", 60.0)
        left = used()
    return Outcome(left > 0, f"{filled:.6f} of the queue filled, {left:.6f} left; {said}")
