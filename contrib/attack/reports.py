"""Attacks by what agents say: lying reports, and wake-ups without end."""

from __future__ import annotations

import json
import re
import time
from contextlib import nullcontext

from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Site
from polluxd.model import Step

BELIEVES = """
from polluxd.trusted_reports import TrustedReports
TrustedReports.trust = lambda self, reports, held, now: (dict(reports), {})
"""
NO_FLOOR = """
from polluxd.store import wakeups
wakeups.FLOOR_S = 0.0
made = wakeups.Wakeups.__init__
wakeups.Wakeups.__init__ = lambda self, connector, news: made(self, connector, lambda: True)
"""


@attack("mallory", "further: GPUs explored by claim alone")
def explored_by_claim(site: Site, defended: bool) -> Outcome:
    """polluxd may at most double the explored GPUs in one move."""
    job_id = site.pollux_job("mallory")
    ticket = site.ticket_of(job_id)
    with nullcontext() if defended else site.patched(BELIEVES):
        claim = {"explored_gpus": 987_654, "explored_nodes": 1000}
        site.until(lambda: site.publish("mallory", ticket=ticket, **claim).ok, "the job's report")
        before = site.cycles()
        site.until(lambda: site.cycles() >= before + 2, "two decisions")
        snapshot = site.store.cycle_snapshot(site.cycles())
    jobs = json.loads(snapshot) if isinstance(snapshot, str) else snapshot
    # The snapshot names the doubted claim, too: what counts is the report that polluxd decided on.
    believed = '"explored_gpus": 987654' in json.dumps(jobs)
    return Outcome(believed, f"the claim is {'in' if believed else 'not in'} the report that was decided on")


@attack("mallory", "further: a cost of 50 years claimed for a move, which then is never made again")
def cost_claimed(site: Site, defended: bool) -> Outcome:
    """Undefended: the cost counts from the claimed last step."""
    job_id = site.pollux_job("mallory")
    ticket = site.ticket_of(job_id)
    site.until(lambda: site.publish("mallory", ticket=ticket).ok, "the job's report")
    job = site.job(job_id)
    assert job is not None
    move = site.plan(job_id, *site.places(job.nodes, site.free_nodes()[:1]), path="requeue")
    stamps = '{"last_step_at": 0, "stopped_at": 0}'
    said = f"SELECT pollux.acknowledge_v1({{me}}, {move.id}, '{stamps}')"
    site.until(
        lambda: "True" in site.sql("mallory", said, ticket=ticket)[0].text, "mallory's acknowledgement", 40.0
    )

    def again() -> bool:
        found = site.ticket_of(job_id)
        if found is None or json.loads(found.read_text())["attempt"] != 1:
            return False
        return site.publish("mallory", ticket=found).ok

    site.until(again, "a report of the new attempt", 60.0)
    site.until(
        lambda: next(m for m in site.store.moves(job_id) if m.id == move.id).step is Step.TRAINING, "the move"
    )
    ((acknowledged,),) = site.query("SELECT acknowledged FROM pollux.move WHERE id = %s", move.id)
    (cost,) = [cost for cost in site.store.move_costs(job_id) if cost["id"] == move.id]
    seconds = cost["total_s"] if defended else time.time() - float(acknowledged["last_step_at"])
    return Outcome(seconds > 1e6, f"a cost of {seconds:.0f} s from {acknowledged}")


def _questions(site: Site, seconds: float) -> int:
    """Count the requests for jobs that slurmctld answers in some time."""

    def count() -> int:
        found = re.search(r"REQUEST_JOB_INFO\s.*?count:(\d+)", site.cluster.command("sdiag"))
        return int(found[1]) if found else 0

    before = count()
    time.sleep(seconds)
    return count() - before


@attack("mallory", "row 13: NOTIFY without end makes polluxd ask Slurm without end")
def notified(site: Site, defended: bool) -> Outcome:
    ticket = str(site.ticket("mallory"))
    quiet = _questions(site, 6.0)
    with nullcontext() if defended else site.patched(NO_FLOOR):
        order = {"ticket": ticket, "statements": ["NOTIFY pollux"], "times": 10**6}
        his = site.spawn(
            "mallory", "sh", "-c", 'exec "$@" > /dev/null', "sh", *site.command("sql"), json.dumps(order)
        )
        time.sleep(4.0)
        flooded = _questions(site, 6.0)
        his.kill()
    return Outcome(
        flooded > 2 * quiet + 3, f"{flooded} questions in 6 s of NOTIFY, {quiet} in 6 quiet seconds"
    )
