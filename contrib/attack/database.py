"""Attacks on Postgres, by users and by a gateway that was taken over."""

from __future__ import annotations

import itertools
import json
import time
from contextlib import ExitStack, nullcontext

from contrib.attack.answers import Result
from contrib.attack.registry import Attempt, Outcome, attack
from contrib.attack.site import Site

CONNECTS_FOR_EACH_STATEMENT = """
from polluxd.store.gateway_statements import GatewayStore
run = GatewayStore._run
def afresh(self, query, /, **words):
    self._disconnect()
    return run(self, query, **words)
GatewayStore._run = afresh
"""
LISTENS = """
import psycopg2
from polluxd.daemon import Daemon
cycle = Daemon.run
def listening(self):
    import os, tomllib
    with open(os.environ["POLLUXD_CONFIG"], "rb") as file:
        url = tomllib.load(file)["database"]["url"]
    self.held = psycopg2.connect(url.replace("+psycopg2", ""))
    self.held.autocommit = True
    self.held.cursor().execute("LISTEN pollux")
    return cycle(self)
Daemon.run = listening
"""
"""A session that listens, and reads nothing while polluxd is busy."""


def _shown(results: list[Result]) -> str:
    return "; ".join(result.text[:160] for result in results)


def gateway_login(site: Site) -> str:
    """Return the login of role pollux_gateway."""
    assert site.cluster.postgres is not None
    return site.cluster.postgres.gateway_url.replace("+psycopg2", "")


def daemon_login(site: Site, role: str, password: str) -> str:
    assert site.cluster.postgres is not None
    return f"host=127.0.0.1 port={site.cluster.postgres.port} dbname=pollux user={role} password={password}"


def _taken_over(row: str, what: str, statements: tuple[str, ...], off: str, on: str) -> Attempt:
    """Add an attack with the gateway's role.

    It succeeds where the last but one statement does. The last one takes the effects back.

    Args:
        off, on: statements of the superuser that take the defence away and put it back.
    """

    @attack("whoever took over the gateway", f"{row}: {what}")
    def attempt(site: Site, defended: bool) -> Outcome:
        site.resident("alice")  # her report is in the database
        with nullcontext() if defended else site.undone(off, on):
            results = site.sql("mallory", [gateway_login(site)], *statements)
        assert results[0].ok
        return Outcome(results[-2].ok, _shown(results[1:-1]))

    return attempt


def _granted(row: str, what: str, statement: str, right: str) -> Attempt:
    """Add an attack by one statement that a GRANT would allow."""
    return _taken_over(
        row,
        what,
        ("BEGIN", statement, "ROLLBACK"),
        f"GRANT {right} TO pollux_gateway",
        f"REVOKE {right} FROM pollux_gateway",
    )


_granted(
    "row 8",
    "polluxd's session in the database ended",
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'pollux_daemon' LIMIT 1",
    "pollux_daemon",
)
_granted(
    "row 9",
    "the leadership taken",
    "UPDATE pollux.leader SET holder = 'mallory', epoch = epoch + 1",
    "UPDATE ON pollux.leader",
)
_granted(
    "row 9", "the leader's row locked", "SELECT * FROM pollux.leader FOR UPDATE", "UPDATE ON pollux.leader"
)
_granted(
    "row 14",
    "temporary tables fill the disk",
    "CREATE TEMP TABLE x AS SELECT generate_series(1, 1000)",
    "TEMP ON DATABASE pollux",
)
_granted(
    "further",
    "a setting of the administrators changed",
    "INSERT INTO pollux.setting (cluster, name, value) VALUES ('dev', 'user_weights', '{}')",
    "INSERT ON pollux.setting, pollux.setting_audit",
)
_taken_over(
    "further",
    "a move ordered",
    (
        "BEGIN",
        "INSERT INTO pollux.move (cluster, job_id, attempt, path, source, target, reason, step, times, epoch) VALUES"
        " ('dev', 1, 0, 'park', '{}', '{}', '', 'planned', '{\"planned\": 1}', 1)",
        "ROLLBACK",
    ),
    "GRANT INSERT ON pollux.move TO pollux_gateway; GRANT EXECUTE ON FUNCTION pollux.step_rank(text) TO pollux_gateway",
    "REVOKE INSERT ON pollux.move FROM pollux_gateway;"
    " REVOKE EXECUTE ON FUNCTION pollux.step_rank(text) FROM pollux_gateway",
)
_granted(
    "further",
    "the history of reports deleted",
    "DELETE FROM pollux.report_history",
    "DELETE ON pollux.report_history",
)
_granted("further", "a job given to another user", "UPDATE pollux.job SET uid = 0", "UPDATE ON pollux.job")
_granted("further", "polluxd's role taken on", "SET ROLE pollux_daemon", "pollux_daemon")
_granted(
    "further",
    "the passwords of the database read",
    "SELECT rolname, rolpassword FROM pg_authid",
    "SELECT ON pg_authid",
)
_granted(
    "further",
    "a program run by COPY as the database's user",
    "COPY (SELECT 1) TO PROGRAM 'cat >/dev/null'",
    "pg_execute_server_program",
)
_granted(
    "further",
    "a file of the server read",
    "SELECT pg_read_file('postgresql.conf', 0, 10)",
    "EXECUTE ON FUNCTION pg_read_file(text, bigint, bigint)",
)


@attack(
    "whoever took over the gateway", "row 10: locks on the tables that the gateway writes freeze the cycle"
)
def cycle_frozen(site: Site, defended: bool) -> Outcome:
    """Undefended: the role may change rows that polluxd writes.

    Users of an earlier version could.
    """
    job_id = site.pollux_job("alice")
    grant = "GRANT UPDATE ON pollux.job TO pollux_gateway"
    tables = ["report_history", "acknowledgement", "fingerprint", "token", *([] if defended else ["job"])]
    locked = []
    with (
        nullcontext()
        if defended
        else site.undone(grant, grant.replace("GRANT", "REVOKE").replace(" TO ", " FROM "))
    ):
        for name, mode in itertools.product(tables, ("ROW EXCLUSIVE", "ACCESS EXCLUSIVE")):
            lock = f"LOCK TABLE pollux.{name} IN {mode} MODE"
            order = {"logins": [gateway_login(site)], "statements": ["BEGIN", lock], "hold_s": 120}
            his = site.spawn("mallory", *site.command("sql"), json.dumps(order))
            assert his.stdout is not None
            lines = [his.stdout.readline() for _ in range(3)]
            locked += [(name, mode)] if json.loads(lines[-1])["ok"] else []
        # polluxd writes the end of a job and the start of another.
        site.cluster.command("scancel", str(job_id))
        before = site.cycles()
        try:
            site.pollux_job("alice")
            site.until(lambda: site.cycles() >= before + 3, "three decisions", 40.0)
        except TimeoutError as error:
            return Outcome(True, f"{error}; {site.cycles() - before} decisions beside locks on {locked}")
        finally:
            site.end_spawned()
    return Outcome(False, f"{site.cycles() - before} decisions beside locks on {locked}")


@attack("third", "row 12: a user logs in to the database")
def logs_in(site: Site, defended: bool) -> Outcome:
    """The user knows how roles are named, and guesses passwords."""
    grant = (
        "CREATE ROLE pollux_guess LOGIN PASSWORD 'pollux'; GRANT CONNECT ON DATABASE pollux TO pollux_guess",
        "REVOKE CONNECT ON DATABASE pollux FROM pollux_guess; DROP ROLE pollux_guess",
    )
    agent = f"pollux_agent_{site.uid('third')}"
    roles = (
        "pollux-third",
        agent,
        "pollux_agent",
        "pollux_gateway",
        "pollux_daemon",
        "postgres",
        "pollux_read",
    )
    with nullcontext() if defended else site.undone(*grant):
        logins = [
            daemon_login(site, role, password)
            for role in (*roles, "pollux_guess")
            for password in ("pollux", role, "''")
        ]
        results = site.sql("third", logins)
    return Outcome(any(r.ok for r in results), f"{len(results)} logins; {results[0].text[-90:]}")


@attack("third", "row 12: silent connections take all logins of Postgres")
def logins_taken(site: Site, defended: bool) -> Outcome:
    """polluxd and the gateway keep their connections.

    Only users of Postgres' own machine reach its port.
    """
    assert site.cluster.postgres is not None
    port = f"[{site.cluster.postgres.port}]"
    token = site.token("alice")
    site.store.latest_cycle()  # its connection stays open
    said = ("POST", "/v1/training", {"fingerprint": "ab" * 16, "gpu_type": ""})
    with nullcontext() if defended else site.gateway.patched(CONNECTS_FOR_EACH_STATEMENT):
        site.ask("alice", said, token=token)
        his = site.spawn("third", *site.command("strangers"), "idle", "127.0.0.1", port, "30")
        assert his.stdout is not None
        line = his.stdout.readline().strip()
        before = site.store.latest_cycle()
        answers = site.ask("alice", said, token=token, times=5, pause_s=0.5)
        if defended:
            site.until(lambda: site.store.latest_cycle() != before, "the next decision", 40.0)
        his.kill()
    refused = [answer.text for answer in answers if not answer.ok]
    site.until(lambda: site.ask("alice", said, token=token)[0].ok, "the next answer", 90.0)
    return Outcome(
        bool(refused),
        f"{line}; {len(refused)} of {len(answers)} requests refused {refused[:1]}",
    )


@attack("mallory", "further: a flood of NOTIFY fills the server's queue, and stops drains")
def notification_queue(site: Site, defended: bool) -> Outcome:
    """A full queue refuses every NOTIFY.

    In both cases a site has given mallory a login, and undefended polluxd listens.
    """
    role = (
        "CREATE ROLE pollux_guest LOGIN PASSWORD 'guest'; GRANT CONNECT ON DATABASE pollux TO pollux_guest",
        "REVOKE CONNECT ON DATABASE pollux FROM pollux_guest; DROP ROLE pollux_guest",
    )
    flood = "SELECT count(pg_notify('pollux', g || repeat('x', 7900))) FROM generate_series(1, 2000) g"
    with ExitStack() as stack:
        stack.enter_context(site.undone(*role))
        if not defended:
            stack.enter_context(site.patched(LISTENS))
        job_id = site.pollux_job("alice")
        site.reported("alice", job_id)
        site.sql("mallory", [daemon_login(site, "pollux_guest", "guest")], flood, times=4)
        time.sleep(1.0)
        ((left,),) = site.query("SELECT pg_notification_queue_usage()")
        if not defended:
            return Outcome(left > 0, f"{left:.6f} of the queue is left")
        move = site.drained("alice", job_id)
    return Outcome(left > 0, f"{left:.6f} of the queue is left; alice's move {move.id} went on")
