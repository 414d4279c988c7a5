"""Attacks by jobs that nobody has measured yet, on nodes of 4 GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from contrib.attack.registry import Outcome, attack
from contrib.attack.report import report
from contrib.attack.site import Site

JOBS = 6
"""6 starts on a node leave 4 of 28 GPUs."""
HERS = 8
"""Jobs of alice's with one GPU each: less than her half of the cluster."""


def _gpus(site: Site, jobs: list[int]) -> int:
    found = site.slurm.jobs(jobs).values()
    return sum(sum(job.gpus_per_node_held.values()) for job in found if not job.state.finished)


def _what_alice_gets(site: Site, his: list[int]) -> Outcome:
    """Submit jobs of alice's after mallory's; see whether all start."""
    held = _gpus(site, his)
    script = site.script("hers.sh", "#POLLUX max-gpus=1")
    hers = []
    for _ in range(HERS):
        job_id, trouble = site.sbatch("alice", script, "--gres=gpu:1")
        assert job_id is not None, trouble
        hers.append(job_id)
    with suppress(TimeoutError):
        site.until(lambda: _gpus(site, hers) == HERS, "alice's jobs", 25.0)
    started = _gpus(site, hers)
    share = site.gpus // 2
    evidence = f"{len(his)} jobs of mallory's hold {held} GPUs of {site.gpus}; {started} of {HERS} jobs of alice's run"
    # Beyond the share each job starts on the one GPU that any job starts on.
    return Outcome(started < HERS or held > share + len(his), evidence)


def _never_measured(name: str, again: int) -> None:
    """Add an attack by jobs that nobody has measured; so many of them report, and give way to new ones."""

    @attack("mallory", f"further: {name}")
    def attempt(site: Site) -> Outcome:
        site.resident("alice")
        his = [site.pollux_job("mallory", "max-gpus=4") for _ in range(JOBS)]
        for _ in range(again):
            gpus = _gpus(site, his[:1])
            site.reported("mallory", his[0], gpus=gpus, explored_gpus=gpus)
            site.run("mallory", "scancel", str(his.pop(0)))
            his.append(site.pollux_job("mallory", "max-gpus=4"))
        return _what_alice_gets(site, his)


# A running job that never reported keeps its GPUs.
_never_measured("jobs that never report and come one after another, each on the GPUs of a node", 0)
# A job that has reported can be moved; the next one cannot.
_never_measured("jobs that report, are cancelled and submitted again, and so are never measured", JOBS)


@contextmanager
def _contradictory(site: Site, token: str) -> Iterator[None]:
    """Report without end, each report unlike the one before."""
    said: tuple[dict[str, Any], ...] = (
        {"noise": None},
        {"explored_gpus": 0},
        {"explored_gpus": 900, "explored_nodes": 7},
        {"params": None, "noise": None},
        {"times": {}},
        {"resized": 10**6},
    )
    requests = [("POST", "/v1/report", report(**_SLOW | changes)) for changes in said]
    order = site.order(*requests, token=token, times=100, pause_s=0.6)
    his = site.spawn(
        "mallory", "sh", "-c", 'exec "$@" > /dev/null', "sh", *site.command("gateway", "ask", order)
    )
    try:
        yield
    finally:
        his.kill()


_SLOW = {
    "params": dict.fromkeys(("alpha_grad", "beta_grad"), 0.01)
    | dict.fromkeys(("alpha_local", "beta_local", "alpha_node", "beta_node"), 9.0)
    | {"gamma": 1.5}
}
"""A job that is slower on several GPUs: polluxd has no reason to move it."""


@attack(
    "mallory",
    "further: contradictory reports and a requeue make polluxd decide without end, and move alice's job",
)
def decisions_provoked(site: Site) -> Outcome:
    """polluxd decides early when a job is first measured at its GPUs."""
    hers = site.pollux_job("alice", "adaptive=no")
    his = site.pollux_job("mallory", "adaptive=no")
    site.reported("alice", hers, **_SLOW)
    seconds, counts = 20.0, list[int]()
    moved = len(site.store.moves(hers))
    for attempt in (0, 1):
        if attempt:
            site.run("mallory", "scontrol", "requeue", str(his))
        site.reported("mallory", his, attempt, **_SLOW)
        with _contradictory(site, site.token("mallory", his, attempt)):
            time.sleep(2.0)
            before = site.cycles()
            time.sleep(seconds)
            counts.append(site.cycles() - before)
    moves = len(site.store.moves(hers)) - moved
    # One of every interval, and three for the number of GPUs that his job holds: its fit, noise scale and progress.
    most = seconds / site.polluxd.interval_s + 1 + 3
    return Outcome(
        max(counts) > most or moves > 0,
        f"{' and '.join(map(str, counts))} decisions in {seconds:g} s each, at most {most:g} are due; "
        f"{moves} moves of alice's job",
    )
