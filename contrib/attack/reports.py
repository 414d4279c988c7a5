"""Attacks by reports: claims, costs, and floods."""

from __future__ import annotations

import json
import re
import time

from contrib.attack.answers import Request
from contrib.attack.registry import Outcome, attack
from contrib.attack.report import report
from contrib.attack.site import Site
from polluxd.model import Step


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
    requests: list[Request] = [
        ("POST", "/v1/report", report(times={"first_step_at": now - n})) for n in range(60)
    ]
    requests += [("GET", "/v1/orders?seen=1", None)] * 60
    quiet = _questions(site, 6.0)
    order = site.order(*requests, token=token, until_s=60.0)
    his = site.spawn(
        "mallory", "sh", "-c", 'exec "$@" > /dev/null', "sh", *site.command("gateway", "ask", order)
    )
    time.sleep(4.0)
    flooded = _questions(site, 6.0)
    his.kill()
    return Outcome(flooded > quiet + 5, f"{flooded} questions in 6 s of reports, {quiet} in 6 s without")
