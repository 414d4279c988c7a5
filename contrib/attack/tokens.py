"""Attacks on tokens, and by what a token allows: reports that claim, cost and flood."""

from __future__ import annotations

import json
import re
import time

from contrib.attack.messages import Answer, Request, report
from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Site
from polluxd.model import Step

SECRET = "a" * 43


def reporting(**changes: object) -> Request:
    return ("POST", "/v1/report", report(**changes))


@attack("mallory", "row 11: a token for alice's job, by a credential that names the job")
def for_another(site: Site) -> list[Answer]:
    hers = site.resident("alice")
    return site.ask("mallory", reporting(), payload=site.payload(hers))


@attack("mallory", "row 11: a credential of alice's that was sent already")
def credential_replayed(site: Site) -> list[Answer]:
    """Whoever reads the traffic to a gateway has seen it."""
    payload = json.dumps(site.payload(site.resident("alice")))
    credential = site.hands("alice", "gateway", "encode", payload).strip()
    hers = site.ask("alice", credential=credential)
    his = site.ask("mallory", reporting(), credential=credential)
    assert hers[0].ok
    return his


@attack("third", "row 11: tokens read from the database")
def tokens_read(site: Site) -> list[Answer]:
    """A site has let its dashboards read the table."""
    assert site.cluster.postgres is not None
    hers = site.resident("alice")
    site.ask("alice", payload=site.payload(hers))
    newest = "SELECT encode(hash, 'hex') FROM pollux.token ORDER BY made_at DESC LIMIT 1"
    site.query("GRANT SELECT ON pollux.token TO pollux_read")
    try:
        read = site.sql("third", [site.cluster.postgres.read_dsn], newest)[-1]
    finally:
        site.query("REVOKE SELECT ON pollux.token FROM pollux_read")
    secret = bytes.fromhex(read.text.strip("[](),'"))
    return site.ask("third", reporting(), token=f"J.{hers}.0.{secret.hex()[:43]}")


def _ended_job(site: Site, attempt: int = 0) -> tuple[int, str]:
    """Cancel a job of mallory's; return its id and the token of an attempt."""
    job_id = site.pollux_job("mallory")
    token = site.token("mallory", job_id, attempt)
    site.cluster.command("scancel", str(job_id))
    site.until(
        lambda: site.query("SELECT 1 FROM pollux.job WHERE job_id = %s AND ended_at IS NOT NULL", job_id),
        "polluxd to see the job's end",
    )
    return job_id, token


EVERYTHING: tuple[Request, ...] = (
    reporting(),
    ("GET", "/v1/orders?seen=", None),
    ("POST", "/v1/acknowledgements", {"move": 1}),
    ("POST", "/v1/training", {"fingerprint": "ab" * 16, "gpu_type": ""}),
)
"""What a job's token opens."""


@attack("mallory", "row 21: a token after scancel")
def token_after_scancel(site: Site) -> list[Answer]:
    """The gateway remembers a token for a minute: a new one has not seen it."""
    _, token = _ended_job(site)
    remembered = site.ask("mallory", reporting(), token=token)
    site.gateway.restart()
    return remembered + site.ask("mallory", *EVERYTHING, token=token)


@attack("mallory", "row 21: a token of an earlier attempt")
def token_of_an_earlier_attempt(site: Site) -> list[Answer]:
    job_id = site.pollux_job("mallory")
    token = site.token("mallory", job_id)
    site.run("mallory", "scontrol", "requeue", str(job_id))
    site.until(lambda: site.started(job_id, 1), "attempt 1", 90.0)
    site.gateway.restart()
    return site.ask("mallory", *EVERYTHING, token=token)


@attack("mallory", "row 21: a token after its job's id is used again, by alice")
def replayed(site: Site) -> list[Answer]:
    """Slurm counts from 1 again: the id is now of a job of alice's."""
    job_id, token = _ended_job(site)
    again = "UPDATE pollux.job SET uid = %s, ended_at = NULL WHERE job_id = %s"
    site.polluxd.stop()  # it would write down that Slurm does not show the job
    try:
        site.query(again, site.uid("alice"), job_id)
        site.gateway.restart()
        return site.ask("mallory", *EVERYTHING, token=token)
    finally:
        site.query("DELETE FROM pollux.job WHERE job_id = %s", job_id)
        site.polluxd.start()


@attack("mallory", "row 21: tokens for attempts far above the known one outlive their job")
def attempts_ahead(site: Site) -> list[Answer]:
    """The next attempt is accepted while the job runs."""
    _, token = _ended_job(site, attempt=1)
    remembered = site.ask("mallory", reporting(), token=token)
    job_id = site.pollux_job("mallory")
    site.gateway.restart()
    ahead = [site.ask("mallory", payload=site.payload(job_id, n))[0] for n in (2, 2_000_000_000)]
    return remembered + ahead + site.ask("mallory", *EVERYTHING, token=token)


@attack("mallory", "further: guessed tokens of alice's job")
def guessed(site: Site) -> list[Answer]:
    """The secret is a random number."""
    hers = site.resident("alice")
    site.ask("alice", payload=site.payload(hers))
    guesses = [SECRET, "", "0" * 43, SECRET[:42] + "b", SECRET + "a", "%", f"{SECRET}' OR '1'='1"]
    texts = [f"J.{hers}.{attempt}.{guess}" for guess in guesses for attempt in (0, 1)]
    return [site.ask("mallory", reporting(), token=text)[0] for text in texts]


@attack("mallory", "further: a job's token asks polluxctl's questions, polluxctl's token reports")
def kinds_of_tokens(site: Site) -> list[Answer]:
    """Ranks and containers have a job's token.

    It tells nothing of the user's other jobs.
    """
    token = site.token("mallory")
    asked = site.ask("mallory", ("GET", "/v1/jobs", None), token=token)
    (_, *said) = site.ask("mallory", *EVERYTHING, payload=site.question())
    return asked + said


@attack("third", "further: alice's jobs explained, and their reports, to another user")
def questions_of_others(site: Site) -> Outcome:
    hers = site.resident("alice")
    asked: list[Request] = [("GET", f"/v1/jobs/{hers}/{what}", None) for what in ("explain", "history")]
    (_, *answers) = site.ask("third", *asked, ("GET", "/v1/jobs", None), payload=site.question())
    *closed, listed = answers
    rows = [row for row in listed.document if row["job_id"] == hers]
    assert rows, listed.text  # as squeue shows it
    shown = [row["goodput"] for row in rows if row.get("goodput") is not None]
    return Outcome(
        any(a.ok for a in closed) or bool(shown), f"{[a.text for a in closed]}; in the list: {shown}"
    )


@attack("mallory", "further: 200 reports in a minute fill the inbox")
def inbox_flooded(site: Site) -> Outcome:
    job_id = site.pollux_job("mallory")
    token = site.token("mallory", job_id)
    answers = site.ask("mallory", reporting(), token=token, times=200)
    ((rows,),) = site.query("SELECT count(*) FROM pollux.report_history WHERE job_id = %s", job_id)
    return Outcome(rows > 125, f"{rows} rows; the last answer: {answers[-1].text}")


@attack("mallory", "further: time stamps in the future")
def future(site: Site) -> list[Answer]:
    later = time.time() + 1e7
    token = site.token("mallory")
    requests = (reporting(at=later), reporting(times={"first_step_at": later}))
    answers = site.ask("mallory", *requests, token=token)
    site.query(
        "DELETE FROM pollux.report_history WHERE (report -> 'at')::float8 > extract(epoch FROM now()) + 86400"
    )
    return answers


@attack("mallory", "further: reports of 17 kB: 15 times with names of 1,000 characters, long texts")
def long_reports(site: Site) -> Outcome:
    """A report that is stored takes less than 2 kB."""
    job_id = site.pollux_job("mallory")
    token = site.token("mallory", job_id)
    names = {chr(97 + n) * 1000: float(n) for n in range(15)}
    why = "w" * 4000
    requests = (
        reporting(times=names, gpu_type="a" * 64),
        reporting(times={"name" * 100: 1.0}),
        reporting(**{"m" * 1000: 1}),
        reporting(gpu_type="a" * 65),
        reporting(mode="x" * 9000),
        reporting(noise={"sqr": 10**300, "var": 1}),
        reporting(resize_refused={"id": 1, "why": why}),
        reporting(resize_refused={"id": 1, "why": why + why}),
    )
    answers = site.ask("mallory", *requests, token=token)
    asked = "SELECT coalesce(max(octet_length(r::text)), 0) FROM pollux.report_history r WHERE job_id = %s"
    ((longest,),) = site.query(asked, job_id)
    statuses = [answer.status for answer in answers]
    return Outcome(longest > 2048, f"the longest stored report has {longest} bytes; {statuses}")


@attack("mallory", "further: GPUs explored by claim alone")
def explored_by_claim(site: Site) -> Outcome:
    """polluxd may at most double the explored GPUs in one move."""
    job_id = site.pollux_job("mallory")
    claim = {"explored_gpus": 987_654, "explored_nodes": 1000}
    site.reported("mallory", job_id, **claim)
    before = site.cycles()
    site.until(lambda: site.cycles() >= before + 2, "two decisions")
    snapshot = site.store.cycle_snapshot(site.cycles())
    jobs = json.loads(snapshot) if isinstance(snapshot, str) else snapshot
    # The snapshot names the doubted claim, too: what counts is the report that polluxd decided on.
    believed = '"explored_gpus": 987654' in json.dumps(jobs)
    return Outcome(believed, f"the claim is {'in' if believed else 'not in'} the report that was decided on")


@attack("mallory", "further: a cost of 50 years claimed for a move, which then is never made again")
def cost_claimed(site: Site) -> Outcome:
    """The cost once counted from the claimed last step."""
    job_id = site.pollux_job("mallory")
    site.reported("mallory", job_id)
    move = site.drained("mallory", job_id, last_step_at=0.0, stopped_at=0.0)
    site.reported("mallory", job_id, attempt=1)
    site.until(
        lambda: next(m for m in site.store.moves(job_id) if m.id == move.id).step is Step.TRAINING, "the move"
    )
    ((acknowledged,),) = site.query("SELECT acknowledged FROM pollux.move WHERE id = %s", move.id)
    (cost,) = [cost for cost in site.store.move_costs(job_id) if cost["id"] == move.id]
    seconds = cost["total_s"]
    return Outcome(seconds > 1e6, f"a cost of {seconds:.0f} s from {acknowledged}")


def _questions(site: Site, seconds: float) -> int:
    """Count the requests for jobs that slurmctld answers in some time."""

    def count() -> int:
        found = re.search(r"REQUEST_JOB_INFO\s.*?count:(\d+)", site.cluster.command("sdiag"))
        return int(found[1]) if found else 0

    before = count()
    time.sleep(seconds)
    return count() - before


@attack("mallory", "row 13: reports without end make polluxd ask Slurm without end")
def reports_without_end(site: Site) -> Outcome:
    """Each report has a new first step, which a move would wait for."""
    token = site.token("mallory")
    now = time.time()
    requests = [reporting(times={"first_step_at": now - n}) for n in range(60)]
    requests += [("GET", "/v1/orders?seen=1", None)] * 60
    quiet = _questions(site, 6.0)
    order = site.order(*requests, token=token, until_s=60.0)
    site.begin("mallory", "gateway", "ask", order, silent=True)
    time.sleep(4.0)
    flooded = _questions(site, 6.0)
    return Outcome(flooded > quiet + 5, f"{flooded} questions in 6 s of reports, {quiet} in 6 s without")
