"""Attacks on Postgres with the rights of a user's own ticket."""

from __future__ import annotations

import json
import resource
import time
from contextlib import ExitStack, nullcontext

from contrib.attack.registry import Attempt, Outcome, attack
from contrib.attack.site import Answer, Site

BACKEND_BYTES = 448 << 20
SHARED = (
    "CREATE ROLE pollux_shared LOGIN PASSWORD 'shared' IN ROLE pollux_agent",
    "DROP OWNED BY pollux_shared; DROP ROLE pollux_shared",
)
"""One role for all agents, as an earlier version had it."""


def _shown(answers: list[Answer]) -> str:
    return "; ".join(answer.text[:160] for answer in answers)


def _statements(
    row: str,
    what: str,
    statements: tuple[str, ...],
    off: str,
    on: str,
    *,
    actor: str = "mallory",
    **options: str,
) -> Attempt:
    """Add an attack that succeeds where the last statement does.

    Args:
        off, on: statements of the superuser that take the defence away and put it back.
        options: libpq parameters of the login.
    """

    @attack(actor, f"{row}: {what}")
    def attempt(site: Site, defended: bool) -> Outcome:
        site.ticket("alice")  # her report is in the database
        with nullcontext() if defended else site.undone(off, on):
            answers = site.sql("mallory", *statements, login=options)
        return Outcome(answers[-1].ok, _shown(answers))

    return attempt


_statements(
    "row 14",
    "a large object fills the disk",
    ("SELECT lo_from_bytea(0, 'x')",),
    "GRANT EXECUTE ON FUNCTION lo_from_bytea(oid, bytea) TO PUBLIC",
    "REVOKE EXECUTE ON FUNCTION lo_from_bytea(oid, bytea) FROM PUBLIC; SELECT lo_unlink(oid) FROM"
    " pg_largeobject_metadata",
)
_statements(
    "row 14",
    "temporary tables in database postgres",
    ("CREATE TEMP TABLE x AS SELECT generate_series(1, 1000)",),
    "GRANT CONNECT, TEMP ON DATABASE postgres TO PUBLIC",
    "REVOKE ALL ON DATABASE postgres FROM PUBLIC",
    dbname="postgres",
)
_statements(
    "row 14",
    "temporary tables in Pollux' database",
    ("CREATE TEMP TABLE x AS SELECT generate_series(1, 1000)",),
    "GRANT TEMP ON DATABASE pollux TO PUBLIC",
    "REVOKE TEMP ON DATABASE pollux FROM PUBLIC",
)
_statements(
    "row 14",
    "a sort that spills to disk",
    (
        "SET work_mem = '64kB'",
        "SELECT count(*) FROM (SELECT g, repeat('x', 100) FROM generate_series(1, 100000) g ORDER BY 2, 1) s",
    ),
    "ALTER ROLE {mallory} SET temp_file_limit = -1",
    "ALTER ROLE {mallory} SET temp_file_limit = '1MB'",
)
_statements(
    "further",
    "advisory locks fill the shared lock table",
    ("SELECT count(pg_advisory_lock(g)) FROM generate_series(1, 1000) g",),
    "GRANT EXECUTE ON FUNCTION pg_advisory_lock(bigint) TO PUBLIC",
    "REVOKE EXECUTE ON FUNCTION pg_advisory_lock(bigint) FROM PUBLIC",
)
_statements(
    "further",
    "SET ROLE to polluxd's role",
    ("SET ROLE pollux_daemon", "SELECT count(*) FROM pollux.secret"),
    "GRANT pollux_daemon TO {mallory}",
    "REVOKE pollux_daemon FROM {mallory}",
)
_statements(
    "further",
    "a program run by COPY as the database's user",
    ("COPY (SELECT 1) TO PROGRAM 'cat >/dev/null'",),
    "GRANT pg_execute_server_program TO {mallory}",
    "REVOKE pg_execute_server_program FROM {mallory}",
)
_statements(
    "further",
    "a file of the server read by COPY",
    ("SELECT pg_read_file('postgresql.conf', 0, 10)",),
    "GRANT pg_read_server_files TO {mallory}; GRANT EXECUTE ON FUNCTION pg_read_file(text, bigint, bigint) TO PUBLIC",
    "REVOKE pg_read_server_files FROM {mallory}; REVOKE EXECUTE ON FUNCTION pg_read_file(text, bigint, bigint)"
    " FROM PUBLIC",
)
_statements(
    "further",
    "the rows of other users' reports read",
    ("SELECT count(*) FROM pollux.report_history WHERE uid <> {uid}",),
    "GRANT SELECT ON pollux.report_history TO pollux_agent",
    "REVOKE SELECT ON pollux.report_history FROM pollux_agent",
)
_statements(
    "further",
    "the tickets' secret read from the database",
    ("SELECT encode(key, 'hex') FROM pollux.secret",),
    "GRANT SELECT ON pollux.secret TO pollux_agent",
    "REVOKE SELECT ON pollux.secret FROM pollux_agent",
)
_statements(
    "further",
    "a setting of the administrators changed",
    ("INSERT INTO pollux.setting VALUES ({cluster}, 'user_weights', '{}')",),
    "GRANT INSERT ON pollux.setting TO pollux_agent; GRANT INSERT ON pollux.setting_audit TO pollux_agent",
    "REVOKE INSERT ON pollux.setting FROM pollux_agent; DELETE FROM pollux.setting",
)


@attack("mallory", "row 8: another agent's session ended")
def session_ended(site: Site, defended: bool) -> Outcome:
    """Undefended: all agents share one role, and may end its sessions."""
    site.ticket("alice")
    login = {} if defended else {"user": "pollux_shared", "password": "shared"}
    end = "REVOKE EXECUTE ON FUNCTION pg_terminate_backend(int, bigint) FROM PUBLIC"
    with ExitStack() as stack:
        if not defended:
            stack.enter_context(site.undone(*SHARED))
            stack.enter_context(site.undone(end.replace("REVOKE", "GRANT").replace("FROM", "TO"), end))
        order = {"ticket": str(site.ticket("alice")), "statements": ["SELECT pg_backend_pid()"], "hold_s": 60}
        hers = site.spawn("alice", *site.command("sql"), json.dumps({**order, "login": login}))
        assert hers.stdout is not None
        pid = int(json.loads(hers.stdout.readline())["text"].strip("[](),"))
        hers.stdout.readline()
        answers = site.sql("mallory", f"SELECT pg_terminate_backend({pid})", login=login)
        time.sleep(0.3)
        there = site.query("SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid)
    return Outcome(not there, f"alice's session is {'there' if there else 'gone'}; {_shown(answers)}")


@attack("mallory", "row 8: the agents' role changed under the others")
def role_changed(site: Site, defended: bool) -> Outcome:
    site.ticket("alice")
    hers = site.role("alice")
    changes = ("PASSWORD 'mine'", "SET default_transaction_read_only = on")
    if defended:
        answers = site.sql("mallory", *(f"ALTER ROLE {hers} {c}" for c in changes))
        answers += site.sql("mallory", *(f"ALTER ROLE CURRENT_USER {c}" for c in changes))
        said = site.publish("alice")
        # polluxd repairs mallory's own role.
        site.until(lambda: site.publish("mallory").ok, "the repair of mallory's role", 60.0)
        return Outcome(
            not said.ok, f"alice reports: {said.ok}, and polluxd repaired mallory's role; {_shown(answers)}"
        )
    with site.undone(*SHARED):
        login = {"user": "pollux_shared", "password": "shared"}
        answers = site.sql("mallory", *(f"ALTER ROLE CURRENT_USER {c}" for c in changes), login=login)
        said = site.sql("alice", "SELECT 1", login=login)[0]
    return Outcome(not said.ok, f"alice's login: {said.text}; {_shown(answers)}")


@attack("mallory", "row 9: the leader's lock taken without end")
def lead_taken(site: Site, defended: bool) -> Outcome:
    """Without the defence an advisory lock elects, as in an earlier version."""
    lock = "SELECT pg_advisory_lock(4711)"
    if defended:
        answers = site.sql(
            "mallory",
            lock,
            "UPDATE pollux.leader SET holder = 'mallory', epoch = epoch + 1",
            "SELECT * FROM pollux.leader FOR UPDATE",
        )
        site.polluxd.stop()
        site.polluxd.start()
        known = site.cycles()
        site.until(lambda: site.cycles() > known, "a cycle of the restarted polluxd", 60.0)
        return Outcome(any(a.ok for a in answers), f"the restarted polluxd leads; {_shown(answers)}")
    grant = "GRANT EXECUTE ON FUNCTION pg_advisory_lock(bigint) TO PUBLIC"
    with site.undone(grant, grant.replace("GRANT", "REVOKE").replace("TO PUBLIC", "FROM PUBLIC")):
        order = {"ticket": str(site.ticket("mallory")), "statements": [lock], "hold_s": 60}
        his = site.spawn("mallory", *site.command("sql"), json.dumps(order))
        assert his.stdout is not None
        said = json.loads(his.stdout.readline())
        ((free,),) = site.query("SELECT pg_try_advisory_lock(4711)")
    return Outcome(not free, f"polluxd of before gets the lock: {free}; {said}")


OPEN = ("SET statement_timeout = 0", "SET idle_in_transaction_session_timeout = 0", "BEGIN")


def hold(site: Site, *statements: str) -> list[str]:
    """Have mallory keep a transaction open; return what he was answered."""
    order = {"ticket": str(site.ticket("mallory")), "statements": [*OPEN, *statements], "hold_s": 120}
    his = site.spawn("mallory", *site.command("sql"), json.dumps(order))
    assert his.stdout is not None
    return [his.stdout.readline().strip() for _ in range(len(OPEN) + len(statements) + 1)]


def sessions(site: Site) -> int:
    """Count mallory's sessions that hold a transaction open."""
    asked = "SELECT count(*) FROM pg_stat_activity WHERE usename = %s AND xact_start IS NOT NULL"
    return int(site.query(asked, site.role("mallory").strip('"'))[0][0])


@attack("mallory", "row 10: an open transaction freezes the cycle")
def cycle_frozen(site: Site, defended: bool) -> Outcome:
    """Undefended: agents write a row of polluxd's, as in an earlier version."""
    mine = site.resident("mallory")
    body = "pollux.publish_v1({me}, jsonb_build_object())"
    calls = (
        f"UPDATE pollux.job SET name = name WHERE job_id = {mine}",
        f"SELECT {body}",
        "SELECT pollux.prior_v1({me}, repeat('ab', 16), '')",
    )
    grant = "GRANT SELECT, UPDATE ON pollux.job TO pollux_agent"
    if defended:
        # The denied UPDATE would end the transaction, so the permitted statements run separately.
        denied = site.sql("mallory", calls[0])
        said = hold(site, calls[2], "SELECT pollux.acknowledge_v1({me}, 1, '{}')")
        held, before = sessions(site), site.cycles()
        site.until(lambda: site.cycles() >= before + 2, "two cycles", 40.0)
        return Outcome(
            any(a.ok for a in denied) or not held,
            f"{site.cycles() - before} cycles in mallory's open transaction; {_shown(denied)}; {said[-2:]}",
        )
    with site.undone(grant, grant.replace("GRANT", "REVOKE").replace(" TO ", " FROM ")):
        said = hold(site, calls[0])
        try:
            site.store.sync_jobs([job for job in site.slurm.observe().jobs if job.spec is not None])
        except Exception as error:
            return Outcome("timeout" in str(error), f"polluxd's write failed: {error}"[:300])
    return Outcome(False, f"polluxd wrote the row; {said}")


@attack(
    "mallory", "further: a transaction held open without end, to stop vacuum and the queue of notifications"
)
def transaction_for_ever(site: Site, defended: bool) -> Outcome:
    empty = ("WHERE s.xact_start <", "WHERE false AND s.xact_start <")
    function = "pollux_roles.end_sessions(double precision)"
    with nullcontext() if defended else site.rewritten(function, empty):
        hold(site, "LISTEN pollux", "SELECT txid_current()")
        deadline = time.monotonic() + 40.0
        while (there := sessions(site)) and time.monotonic() < deadline:
            time.sleep(0.5)
            if not defended and time.monotonic() > deadline - 18.0:
                break
    return Outcome(
        bool(there), f"{there} of mallory's transactions open after up to {40 if defended else 22} s"
    )


@attack("mallory", "row 12: connections exhausted")
def connections_exhausted(site: Site, defended: bool) -> Outcome:
    site.ticket("alice")
    off, on = "ALTER ROLE {mallory} CONNECTION LIMIT -1", "ALTER ROLE {mallory} CONNECTION LIMIT 4"
    order = {
        "ticket": str(site.ticket("mallory")),
        "statements": ["SELECT 1"],
        "connections": 110,
        "hold_s": 20,
    }
    with nullcontext() if defended else site.undone(off, on):
        his = site.spawn("mallory", *site.command("sql"), json.dumps(order))
        assert his.stdout is not None
        lines = []
        while "holds" not in (line := his.stdout.readline()) and line:
            lines.append(line.strip())
        said = site.publish("alice")
        his.kill()
    site.until(lambda: site.publish("alice").ok, "alice's next report")
    return Outcome(not said.ok, f"mallory {line.strip()}, {lines[0][:120]}; alice: {said.text[:120]}")


@attack("mallory", "row 14: RAISE LOG fills the server's log")
def log_filled(site: Site, defended: bool) -> Outcome:
    assert site.cluster.postgres is not None
    mark = f"feedface-{time.time_ns()}"
    off = "GRANT USAGE ON LANGUAGE plpgsql TO PUBLIC; ALTER ROLE {mallory} SET log_min_messages = warning"
    on = "REVOKE USAGE ON LANGUAGE plpgsql FROM PUBLIC; ALTER ROLE {mallory} SET log_min_messages = panic"
    with nullcontext() if defended else site.undone(off, on):
        answers = site.sql("mallory", f"DO $$BEGIN RAISE LOG '{mark}'; END$$", f'SELECT 1 / 0 AS "{mark}"')
    logged, deadline = 0, time.monotonic() + 5.0  # the server's log may lie behind
    while not logged and time.monotonic() < deadline:
        time.sleep(0.1)
        logged = site.cluster.postgres.log.read_text(errors="replace").count(mark)
    return Outcome(logged > 0, f"{logged} lines in the server's log; {_shown(answers)}")


@attack("mallory", "further: the server's memory taken by one statement")
def memory_taken(site: Site, defended: bool) -> Outcome:
    """Postgres has no limit: the site sets one (systemd's LimitAS=)."""
    site.ticket("mallory")
    before = resource.getrlimit(resource.RLIMIT_AS)
    site.cluster.stop_postgres()
    try:
        if defended:
            resource.setrlimit(resource.RLIMIT_AS, (BACKEND_BYTES, before[1]))
        site.cluster.start_postgres()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    try:
        answers = site.sql("mallory", "SET statement_timeout = 0", "SELECT length(repeat('x', 300000000))")
    finally:
        site.cluster.stop_postgres()
        site.cluster.start_postgres()
    site.until(lambda: site.publish("alice").ok, "alice's next report")
    # A backend that the kernel kills takes the whole server with it, which is worse.
    crashed = "server closed the connection" in answers[1].text
    return Outcome(answers[1].ok or crashed, _shown(answers))


@attack("mallory", "further: the statements of others, with their tokens, in pg_stat_activity")
def statements_seen(site: Site, defended: bool) -> Outcome:
    order = {"ticket": str(site.ticket("alice")), "statements": ["SELECT {token}"], "hold_s": 60}
    token = json.loads(site.ticket("alice").read_text())["token"]
    hers = site.spawn("alice", *site.command("sql"), json.dumps(order))
    assert hers.stdout is not None
    hers.stdout.readline()
    off, on = "GRANT pg_read_all_stats TO {mallory}", "REVOKE pg_read_all_stats FROM {mallory}"
    with nullcontext() if defended else site.undone(off, on):
        (seen,) = site.sql(
            "mallory", "SELECT string_agg(query, ' ') FROM pg_stat_activity WHERE usename <> session_user"
        )
    return Outcome(
        token in seen.text, "alice's token is shown" if token in seen.text else f"shown: {seen.text[:160]}"
    )
