"""Attacks on Postgres, by users and by a gateway that was taken over."""

from __future__ import annotations

import itertools
import json

from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Site

DENIED = "42501"
"""insufficient_privilege, of the errors of Postgres."""


def gateway_login(site: Site) -> str:
    """Return the login of role pollux_gateway."""
    assert site.cluster.postgres is not None
    return site.cluster.postgres.gateway_url.replace("+psycopg2", "")


STATEMENTS = (
    (
        "row 8: polluxd's session in the database ended",
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'pollux_daemon' LIMIT 1",
    ),
    ("row 9: the leadership taken", "UPDATE pollux.leader SET holder = 'mallory', epoch = epoch + 1"),
    ("row 9: the leader's row locked", "SELECT * FROM pollux.leader FOR UPDATE"),
    ("row 14: temporary tables fill the disk", "CREATE TEMP TABLE x AS SELECT generate_series(1, 1000)"),
    (
        "further: a setting of the administrators changed",
        "INSERT INTO pollux.setting (cluster, name, value) VALUES ('dev', 'user_weights', '{}')",
    ),
    (
        "further: a move ordered",
        "INSERT INTO pollux.move (cluster, job_id, attempt, path, source, target, reason, step, times, epoch) VALUES"
        " ('dev', 1, 0, 'park', '{}', '{}', '', 'planned', '{\"planned\": 1}', 1)",
    ),
    ("further: the history of reports deleted", "DELETE FROM pollux.report_history"),
    ("further: a job given to another user", "UPDATE pollux.job SET uid = 0"),
    ("further: polluxd's role taken on", "SET ROLE pollux_daemon"),
    ("further: the passwords of the database read", "SELECT rolname, rolpassword FROM pg_authid"),
    ("further: a program run by COPY as the database's user", "COPY (SELECT 1) TO PROGRAM 'cat >/dev/null'"),
    ("further: a file of the server read", "SELECT pg_read_file('postgresql.conf', 0, 10)"),
)


def _taken_over(name: str, statement: str) -> None:
    """Add an attack by one statement with the gateway's role. Postgres has to refuse it for want of a right."""

    @attack("whoever took over the gateway", name)
    def attempt(site: Site) -> Outcome:
        site.resident("alice")  # her report is in the database
        let_in, begun, result, _ = site.sql("mallory", [gateway_login(site)], "BEGIN", statement, "ROLLBACK")
        assert let_in.ok
        assert begun.ok
        return Outcome(not result.text.startswith(f"{DENIED}:"), result.text[:160])


for _name, _statement in STATEMENTS:
    _taken_over(_name, _statement)


@attack(
    "whoever took over the gateway", "row 10: locks on the tables that the gateway writes freeze the cycle"
)
def cycle_frozen(site: Site) -> Outcome:
    """Users of an earlier version could change rows that polluxd writes."""
    job_id = site.pollux_job("alice")
    tables = ("report_history", "acknowledgement", "fingerprint", "token")
    locked = []
    for name, mode in itertools.product(tables, ("ROW EXCLUSIVE", "ACCESS EXCLUSIVE")):
        lock = f"LOCK TABLE pollux.{name} IN {mode} MODE"
        order = {"logins": [gateway_login(site)], "statements": ["BEGIN", lock], "hold_s": 120}
        his = site.begin("mallory", "sql", "ask", order)
        lines = [his.line() for _ in range(3)]
        locked += [(name, mode)] if json.loads(lines[-1])["ok"] else []
    # polluxd writes the end of a job and the start of another.
    site.cluster.command("scancel", str(job_id))
    before = site.cycles()
    try:
        site.pollux_job("alice")
        site.until(lambda: site.cycles() >= before + 3, "three decisions", 40.0)
    except TimeoutError as error:
        return Outcome(True, f"{error}; {site.cycles() - before} decisions beside locks on {locked}")
    return Outcome(False, f"{site.cycles() - before} decisions beside locks on {locked}")


@attack("third", "row 12: a user logs in to the database")
def logs_in(site: Site) -> Outcome:
    """The user knows how roles are named, and guesses passwords."""
    roles = (
        "pollux-third pollux_agent pollux_gateway pollux_daemon postgres pollux_read "
        f"pollux_agent_{site.uid('third')}"
    ).split()
    assert site.cluster.postgres is not None
    here = f"host=127.0.0.1 port={site.cluster.postgres.port} dbname=pollux"
    guesses = ((role, password) for role in roles for password in ("pollux", role, "''"))
    logins = [f"{here} user={role} password={password}" for role, password in guesses]
    results = site.sql("third", logins)
    return Outcome(any(r.ok for r in results), f"{len(results)} logins; {results[0].text[-90:]}")


@attack("third", "row 12: silent connections take all logins of Postgres")
def logins_taken(site: Site) -> Outcome:
    """polluxd and the gateway keep their connections.

    Only users of Postgres' own machine reach its port.
    """
    assert site.cluster.postgres is not None
    token = site.token("alice")
    site.store.latest_cycle()  # its connection stays open
    said = ("POST", "/v1/training", {"fingerprint": "ab" * 16, "gpu_type": ""})
    site.ask("alice", said, token=token)
    his = site.begin("third", "strangers", "idle", "127.0.0.1", [site.cluster.postgres.port], 30)
    line = his.line()
    before = site.store.latest_cycle()
    answers = site.ask("alice", said, token=token, times=5, pause_s=0.5)
    site.until(lambda: site.store.latest_cycle() != before, "the next decision", 40.0)
    his.end()
    refused = [answer.text for answer in answers if not answer.ok]
    site.until(lambda: site.ask("alice", said, token=token)[0].ok, "the next answer", 90.0)
    return Outcome(
        bool(refused),
        f"{line}; {len(refused)} of {len(answers)} requests refused {refused[:1]}",
    )
