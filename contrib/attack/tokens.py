"""Attacks on tokens, on the agents' functions and on the inbox."""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

from contrib.attack.registry import Outcome, attack
from contrib.attack.report import report
from contrib.attack.site import Answer, Site

AUTHORISE = "pollux.authorise(text, bigint, integer, bigint, text)"
_NO_TOKEN = ("known.matched IS NOT TRUE OR", "false OR")
_NO_ROLE = ("IF known.role IS NULL", "IF false")
_NO_OWNER = ("known.uid <> p_uid", "false")
ANYBODY = (_NO_TOKEN, _NO_ROLE, _NO_OWNER)
_NO_END = ("known.ended_at IS NOT NULL AND", "false AND")
_NO_AGE = (
    "IF to_timestamp(made_at::double precision) <",
    "IF false AND to_timestamp(made_at::double precision) <",
)


def _instructions(site: Site, credentials: str, **options: str) -> Answer:
    return site.sql("mallory", f"SELECT pollux.instructions_v1({credentials})", **options)[0]


@attack("mallory", "further: a report for alice's job with mallory's own token")
def for_another(site: Site, defended: bool) -> Outcome:
    hers = site.resident("alice")
    body = "pollux.publish_v1({cluster}, %d, 0, %d, {token}, '%s'::pg_catalog.jsonb)"
    with nullcontext() if defended else site.rewritten(AUTHORISE, *ANYBODY):
        answers = [
            site.sql("mallory", "SELECT " + body % (hers, site.uid(user), json.dumps(report())))[0]
            for user in ("mallory", "alice")
        ]
    return Outcome(any(a.ok for a in answers), "; ".join(a.text[:140] for a in answers))


def _ended_job(site: Site) -> tuple[int, Path]:
    """Cancel a job of mallory's that has reported.

    Returns its id, and her copy of its ticket.
    """
    job_id = site.pollux_job("mallory")
    found = site.ticket_of(job_id)
    assert found is not None
    kept = site.home("mallory") / "stolen.json"
    subprocess.run(["cp", "-p", str(found), str(kept)], check=True)
    site.until(lambda: _instructions(site, "{me}", ticket=kept).ok, "the job's first answer")
    site.cluster.command("scancel", str(job_id))
    site.until(
        lambda: site.query("SELECT 1 FROM pollux.job WHERE job_id = %s AND ended_at IS NOT NULL", job_id),
        "polluxd to see the job's end",
    )
    return job_id, kept


@attack("mallory", "row 21: a token after scancel")
def token_after_scancel(site: Site, defended: bool) -> Outcome:
    _, kept = _ended_job(site)
    with nullcontext() if defended else site.rewritten(AUTHORISE, _NO_END):
        answer = _instructions(site, "{me}", ticket=kept)
    return Outcome(answer.ok, answer.text)


@attack("mallory", "row 21: a token replayed after its job's id is used again, by alice")
def replayed(site: Site, defended: bool) -> Outcome:
    """Slurm counts from 1 again: the id is now of a job of alice's."""
    job_id, kept = _ended_job(site)
    again = (
        "UPDATE pollux.job SET uid = %s, ended_at = NULL, submitted_at = now() + interval '10 min'"
        " WHERE job_id = %s"
    )
    site.polluxd.stop()  # it would write down that Slurm does not show the job
    try:
        site.query(again, site.uid("alice"), job_id)
        with nullcontext() if defended else site.rewritten(AUTHORISE, _NO_OWNER, _NO_AGE):
            as_himself = _instructions(site, "{me}", ticket=kept)
        # An old token is also useless for his own next job with the same id.
        site.query(again, site.uid("mallory"), job_id)
        with nullcontext() if defended else site.rewritten(AUTHORISE, _NO_AGE):
            his_own = _instructions(site, "{me}", ticket=kept)
    finally:
        site.query("DELETE FROM pollux.job WHERE job_id = %s", job_id)
        site.polluxd.start()
    either = as_himself.ok or his_own.ok if defended else as_himself.ok and his_own.ok
    return Outcome(either, f"on alice's job: {as_himself.text[:140]}; on his own: {his_own.text[:140]}")


@attack("mallory", "row 11: objects in schema public that stand before ours read alice's token")
def shadowed_type(site: Site, defended: bool) -> Outcome:
    """Undefended: PUBLIC may create in `public`; agents name no schema."""
    token = json.loads(site.ticket("alice").read_text())["token"]
    trap = (
        "CREATE TABLE public.stolen (x text)",
        "GRANT INSERT ON public.stolen TO PUBLIC",
        "CREATE FUNCTION public.steal(text) RETURNS boolean LANGUAGE sql AS"
        " 'INSERT INTO public.stolen VALUES (current_query()); SELECT true'",
        "CREATE DOMAIN public.jsonb AS text CHECK (public.steal(VALUE))",
    )
    on = "DROP DOMAIN IF EXISTS public.jsonb; DROP FUNCTION IF EXISTS public.steal; DROP TABLE IF EXISTS public.stolen"
    if defended:
        denied = site.sql("mallory", *trap)
        return Outcome(any(a.ok for a in denied), "; ".join(a.text[:60] for a in denied))
    revoke = f"{on}; REVOKE ALL ON SCHEMA public FROM PUBLIC"
    with site.undone("GRANT CREATE, USAGE ON SCHEMA public TO PUBLIC", revoke):
        site.sql("mallory", *trap)
        body = json.dumps(report()).replace("'", "''")
        site.sql(
            "alice",
            "SET search_path = public, pg_catalog",
            f"SELECT pollux.publish_v1({{me}}, '{body}'::jsonb::pg_catalog.jsonb)",
        )
        seen = site.sql("mallory", "SELECT x FROM public.stolen")[0]
    return Outcome(
        token in seen.text, "alice's token is in mallory's table" if token in seen.text else seen.text
    )


@attack("mallory", "row 11: the same trap where a site lets PUBLIC create in schema public")
def shadowed_on_a_lax_site(site: Site, defended: bool) -> Outcome:
    """Agents name their types' schema; their search path has no `public`."""
    token = json.loads(site.ticket("alice").read_text())["token"]
    on = "DROP DOMAIN IF EXISTS public.jsonb; DROP FUNCTION IF EXISTS public.steal; DROP TABLE IF EXISTS public.stolen"
    with site.undone(
        "GRANT CREATE, USAGE ON SCHEMA public TO PUBLIC", f"{on}; REVOKE ALL ON SCHEMA public FROM PUBLIC"
    ):
        site.sql(
            "mallory",
            "CREATE TABLE public.stolen (x text)",
            "GRANT INSERT ON public.stolen TO PUBLIC",
            "CREATE FUNCTION public.steal(text) RETURNS boolean LANGUAGE sql AS"
            " 'INSERT INTO public.stolen VALUES (current_query()); SELECT true'",
            "CREATE DOMAIN public.jsonb AS text CHECK (public.steal(VALUE))",
        )
        body = json.dumps(report()).replace("'", "''")
        if defended:
            said = site.publish("alice")
        else:
            unqualified = f"SELECT pollux.publish_v1({{me}}, '{body}'::jsonb::pg_catalog.jsonb)"
            said = site.sql("alice", "SET search_path = public, pg_catalog", unqualified)[-1]
        seen = site.sql("mallory", "SELECT count(*), string_agg(x, ' ') FROM public.stolen")[0]
    return Outcome(token in seen.text, f"alice reported: {said.ok}; in mallory's table: {seen.text[:40]}")


@attack("mallory", "further: a function that stands before authorise, by the caller's search path")
def shadowed_function(site: Site, defended: bool) -> Outcome:
    hers, uid = site.resident("alice"), site.uid("alice")
    trap = (
        "CREATE FUNCTION public.authorise(text, bigint, integer, bigint, text) RETURNS pollux.standing"
        " LANGUAGE sql AS 'SELECT NULL::pollux.standing'",
        "GRANT EXECUTE ON FUNCTION public.authorise TO PUBLIC",
        "SET search_path = public, pollux, pg_catalog",
        f"SELECT pollux.instructions_v1({{cluster}}, {hers}, 0, {uid}, 'x')",
    )
    lax = (
        "GRANT CREATE, USAGE ON SCHEMA public TO PUBLIC",
        "DROP FUNCTION IF EXISTS public.authorise;REVOKE ALL ON SCHEMA public FROM PUBLIC",
    )
    function = "pollux.instructions_v1(text, bigint, integer, bigint, text)"
    pinned = "SET search_path = pg_catalog, pollux, pg_temp"
    with ExitStack() as stack:
        stack.enter_context(site.undone(*lax))
        if not defended:
            stack.enter_context(
                site.undone(f"ALTER FUNCTION {function} RESET ALL", f"ALTER FUNCTION {function} {pinned}")
            )
        answers = site.sql("mallory", *trap)
    return Outcome(answers[-1].ok, "; ".join(a.text[:120] for a in answers))


@attack("mallory", "further: 200 reports in a minute fill the inbox")
def inbox_flooded(site: Site, defended: bool) -> Outcome:
    job_id = site.pollux_job("mallory")
    found = site.ticket_of(job_id)
    site.until(lambda: site.publish("mallory", ticket=found).ok, "the job's first report")
    function = "pollux.publish_v1(text, bigint, integer, bigint, text, jsonb)"
    body = json.dumps(report()).replace("'", "''")
    statement = f"SELECT pollux.publish_v1({{me}}, '{body}'::pg_catalog.jsonb)"
    with (
        nullcontext()
        if defended
        else site.rewritten(
            function, ("a_minute constant integer := 120", "a_minute constant integer := 1000000")
        )
    ):
        answers = site.sql("mallory", statement, ticket=found, times=200)
    ((rows,),) = site.query("SELECT count(*) FROM pollux.report_history WHERE job_id = %s", job_id)
    return Outcome(rows > 125, f"{rows} rows; the last answer: {answers[-1].text[:120]}")


@attack("mallory", "further: time stamps in the future")
def future(site: Site, defended: bool) -> Outcome:
    later = time.time() + 1e7
    function = "pollux.report_of(jsonb)"
    clock = (
        "required_number(p_payload, 'at', 0, extract(epoch FROM clock_timestamp()) + 300)",
        "required_number(p_payload, 'at', 0, 1e15)",
    )
    stamps = (
        "number_of(stamps, member, 0, extract(epoch FROM clock_timestamp()) + 300)",
        "number_of(stamps, member, 0, 1e15)",
    )
    with ExitStack() as stack:
        if not defended:
            stack.enter_context(site.rewritten(function, clock))
            stack.enter_context(site.rewritten("pollux.stamps_of(jsonb, text)", stamps))
        answers = [site.publish("mallory", at=later), site.publish("mallory", times={"first_step_at": later})]
    return Outcome(any(a.ok for a in answers), "; ".join(a.text[:120] for a in answers))


@attack("third", "further: a user without jobs, and without a ticket, logs in")
def without_a_ticket(site: Site, defended: bool) -> Outcome:
    """The user knows how roles are named, and guesses passwords."""
    ticket = json.loads(site.ticket("alice").read_text())
    words = {"cluster": ticket["cluster"], "job_id": 1, "attempt": 0, "uid": site.uid("third"), "token": ""}
    known = site.folder / "guess.json"
    answers = []
    role = site.role("alice").strip('"')
    grant = (
        "CREATE ROLE pollux_guess LOGIN PASSWORD 'pollux' IN ROLE pollux_agent",
        "DROP ROLE pollux_guess",
    )
    with nullcontext() if defended else site.undone(*grant):
        for user in (role, "pollux_agent", "pollux_daemon", "postgres", "pollux_read", "pollux_guess"):
            for password in ("pollux", role, "''"):
                dsn = f"{site.cluster.agent_dsn} user={user} password={password}"
                known.write_text(json.dumps({**words, "dsn": dsn}))
                answers += site.sql("third", "SELECT session_user", ticket=known)
    won = [a.text for a in answers if a.ok]
    return Outcome(bool(won), f"{len(answers)} logins, let in: {won}; {answers[-1].text[-90:]}")
