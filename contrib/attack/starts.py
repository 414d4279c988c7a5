"""Attacks by jobs that nobody has measured yet, on nodes of 4 GPUs."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from contrib.attack.messages import report
from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Site

JOBS = 6
"""6 starts on a node leave 4 of 28 GPUs."""
HERS = 8
"""Jobs of alice's with one GPU each: less than her half of the cluster."""


def _what_alice_gets(site: Site, his: list[int]) -> Outcome:
    """Submit jobs of alice's after mallory's; see whether all start."""
    held = site.held(*his)
    script = site.script("hers.sh", "#POLLUX max-gpus=1")
    hers = [site.submit("alice", script, "--gres=gpu:1") for _ in range(HERS)]
    with suppress(TimeoutError):
        site.until(lambda: site.held(*hers) == HERS, "alice's jobs", 25.0)
    started = site.held(*hers)
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
            gpus = site.held(his[0])
            site.reported("mallory", his[0], gpus=gpus, explored_gpus=gpus)
            site.run("mallory", "scancel", str(his.pop(0)))
            his.append(site.pollux_job("mallory", "max-gpus=4"))
        return _what_alice_gets(site, his)


# A running job that never reported keeps its GPUs.
_never_measured("jobs that never report and come one after another, each on the GPUs of a node", 0)
# A job that has reported can be moved; the next one cannot.
_never_measured("jobs that report, are cancelled and submitted again, and so are never measured", JOBS)


_SLOW = {
    "params": dict.fromkeys(("alpha_grad", "beta_grad"), 0.01)
    | dict.fromkeys(("alpha_local", "beta_local", "alpha_node", "beta_node"), 9.0)
    | {"gamma": 1.5}
}
"""A job that is slower on several GPUs: polluxd has no reason to move it."""


_CONTRADICTORY: tuple[dict[str, Any], ...] = (
    {"noise": None},
    {"explored_gpus": 0},
    {"explored_gpus": 900, "explored_nodes": 7},
    {"params": None, "noise": None},
    {"times": {}},
    {"resized": 10**6},
)
"""What reports say in turns, each unlike the one before."""


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
        requests = [("POST", "/v1/report", report(**_SLOW | changes)) for changes in _CONTRADICTORY]
        order = site.order(*requests, token=site.token("mallory", his, attempt), times=100, pause_s=0.6)
        without_end = site.begin("mallory", "gateway", "ask", order, silent=True)
        time.sleep(2.0)
        before = site.cycles()
        time.sleep(seconds)
        counts.append(site.cycles() - before)
        without_end.end()
    moves = len(site.store.moves(hers)) - moved
    # One of every interval, and three for the number of GPUs that his job holds: its fit, noise scale and progress.
    most = seconds / site.interval_s + 1 + 3
    return Outcome(
        max(counts) > most or moves > 0,
        f"{' and '.join(map(str, counts))} decisions in {seconds:g} s each, at most {most:g} are due; "
        f"{moves} moves of alice's job",
    )
