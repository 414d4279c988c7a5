"""Floods, silence and endless messages at the gateway; another user asks at the same time."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from contrib.attack.registry import Attempt, Outcome, attack
from contrib.attack.site import Answer, Site

SECONDS = 25
"""Of a flood."""
LONGEST_S = 0.5
"""By which an answer may take longer beside a flood."""
MEMORY_MB = 512
"""Half of MemoryMax in polluxd-gateway.service."""

STRANGERS_STAY = """
from polluxd.gateway import connections, server
connections.Bounds.__init__.__defaults__ = (3600.0, 75.0, 8192, 10**9, 300, 10**9, 6)
def refuse(self, visitor):
    if len(self) >= 300:
        return False
    self._all.add(visitor)
    return True
connections.Entrance.arrive = refuse
"""
"""The first 300 keep their places, as in a server with a fixed number of them."""
NO_TURNS = """
from polluxd.gateway import budgets
budgets.Budget.take = lambda self, key: True
budgets.Budget.spent = lambda self, key: False
made = budgets.Turns.__init__
budgets.Turns.__init__ = lambda self, under_way, in_line: made(self, 10**6, 10**6)
"""
ANY_LENGTH = """
from dataclasses import replace
from polluxd.gateway import app
app.ENDPOINTS = tuple(replace(each, longest=1 << 40) for each in app.ENDPOINTS)
"""


def asked(site: Site, times: int = 5) -> list[Answer]:
    """Have alice ask for the list of jobs, each time over a new connection and with a new token.

    An answer's seconds are those of both requests.
    """
    found = []
    for _ in range(times):
        token, listed = site.ask("alice", ("GET", "/v1/jobs", None), payload=site.question())
        last = listed if token.ok else token
        found.append(replace(last, seconds=token.seconds + listed.seconds))
    return found


def tokens(site: Site, number: int = 8) -> list[str]:
    """Return user tokens of mallory's: no user has more at a time."""
    return [site.ask("mallory", payload=site.question())[0].document["token"] for _ in range(number)]


@contextmanager
def flood(site: Site, what: str, connections: int, *more: str) -> Iterator[subprocess.Popen[str]]:
    words = (what, site.gateway.url, str(SECONDS), str(connections), *more)
    his = site.spawn("mallory", *site.command("floods"), *words)
    assert his.stdout is not None
    his.stdout.readline()
    try:
        yield his
    finally:
        his.kill()


def beside(site: Site, what: str, connections: int, *more: str) -> Outcome:
    """Compare alice's answers beside a flood of mallory's with those before it."""
    quiet = statistics.median(each.seconds for each in asked(site, 3))
    with flood(site, what, connections, *more):
        answers = asked(site)
    refused = [each.text for each in answers if not each.ok]
    seconds = statistics.median(each.seconds for each in answers)
    memory = site.gateway.memory_mb()
    return Outcome(
        bool(refused) or seconds > quiet + LONGEST_S or memory > MEMORY_MB,
        f"alice's answers: {seconds:.2f} s beside the flood, {quiet:.2f} s without; "
        f"{len(refused)} of {len(answers)} refused {refused[:1]}; {memory} MB",
    )


def _flood(name: str, what: str, connections: int, patch: str, of: str = "") -> Attempt:
    """Add a flood.

    Args:
        of: whose tokens it has: those of mallory ("user"), those of a job ("job"), none.
    """

    @attack("mallory", name)
    def attempt(site: Site, defended: bool) -> Outcome:
        with site.gateway.patched("" if defended else patch):
            found = tokens(site) if of == "user" else [site.token("mallory")] if of else []
            return beside(site, what, connections, json.dumps(found))

    return attempt


_flood("row 12: 1,000 silent connections, renewed without end", "silent", 1000, STRANGERS_STAY)
_flood(
    "further: 1,000 requests of a byte every half second, renewed without end", "slow", 1000, STRANGERS_STAY
)
_flood("further: connections without end", "connect", 300, STRANGERS_STAY)
beside_requests = _flood("further: requests for the list of jobs without end", "ask", 48, NO_TURNS, "user")
_flood("further: 1,000 polls for orders at the same time", "poll", 1000, STRANGERS_STAY, "job")
_flood("further: tokens that nobody gave out, without end", "unknown", 200, NO_TURNS)
_flood("further: munge credentials that are no good, without end", "credentials", 200, NO_TURNS)


@attack("mallory", "row 14: bodies and headers of 64 MB, deeply nested JSON")
def long_messages(site: Site, defended: bool) -> Outcome:
    token = json.dumps([site.token("mallory")])
    with nullcontext() if defended else site.gateway.patched(ANY_LENGTH):
        before = site.gateway.memory_mb()
        outcomes = [beside(site, what, 16, token) for what in ("bodies", "headers", "nested")]
        grown, runs = site.gateway.memory_mb() - before, site.gateway.runs
    return Outcome(
        any(each.succeeded for each in outcomes) or not runs,
        f"{grown} MB more; " + " | ".join(each.evidence for each in outcomes),
    )
