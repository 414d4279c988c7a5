"""Floods, silence and endless messages at the gateway."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from contrib.attack.messages import Answer
from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Site, slowness

SECONDS = 25
"""Of a flood."""
LONGEST_S = 0.5
"""By which an answer may take longer beside a flood."""
MOST_GROWN_MB = 64
"""By long messages: 6 connections show one token, and hold 16 kB each."""
MEMORY_MB = 512
"""Half of MemoryMax in polluxd-gateway.service."""


def asked(site: Site, path: str = "/v1/jobs", times: int = 5) -> list[Answer]:
    """Have alice ask a question.

    Each time she has a new connection and a new token.
    An answer's seconds are those of both requests.
    """
    found = []
    for _ in range(times):
        token, listed = site.ask("alice", ("GET", path, None), payload=site.question())
        last = listed if token.ok else token
        found.append(replace(last, seconds=token.seconds + listed.seconds))
    return found


def tokens(site: Site, number: int = 8) -> list[str]:
    """Return user tokens of mallory's: no user has more at a time."""
    return [site.ask("mallory", payload=site.question())[0].document["token"] for _ in range(number)]


@contextmanager
def flood(site: Site, what: str, connections: int, *more: object) -> Iterator[None]:
    words = (what, site.gateway.url, SECONDS, connections, *(more or ([],)))
    his = site.begin("mallory", "floods", "flood", *words)
    his.line()
    try:
        yield
    finally:
        his.end()


def beside(site: Site, floods: Mapping[str, int], *more: object, path: str = "/v1/jobs") -> Outcome:
    """Compare alice's answers beside floods with those before them."""
    quiet = statistics.median(each.seconds for each in asked(site, path, 3))
    longest = LONGEST_S * slowness()
    with ExitStack() as stack:
        for what, connections in floods.items():
            stack.enter_context(flood(site, what, connections, *more))
        answers = asked(site, path)
    refused = [each.text for each in answers if not each.ok]
    seconds = statistics.median(each.seconds for each in answers)
    memory = site.gateway.memory_mb()
    return Outcome(
        bool(refused) or seconds > quiet + longest or memory > MEMORY_MB,
        f"alice's answers: {seconds:.2f} s beside the flood, {quiet:.2f} s without, "
        f"{longest:.1f} s more are due; "
        f"{len(refused)} of {len(answers)} refused {refused[:1]}; {memory} MB",
    )


def _flood(name: str, floods: Mapping[str, int], of: str = "") -> None:
    """Add an attack by floods.

    Args:
        floods: connections of each.
        of: whose tokens it has: those of mallory ("user"), those of a job ("job"), none.
    """

    @attack("mallory", name)
    def attempt(site: Site) -> Outcome:
        site.gateway.restart()
        found = tokens(site) if of == "user" else [site.token("mallory")] if of else []
        return beside(site, floods, found)


_flood("row 12: 3,000 silent connections, renewed without end", {"silent": 3000, "connect": 100})
_flood("further: 1,000 requests of a byte every half second, renewed without end", {"slow": 1000})


@attack("mallory", "further: explanations of jobs without end")
def explanations(site: Site) -> Outcome:
    """polluxd's decision is made again for each of them."""
    his, hers = (f"/v1/jobs/{site.resident(user)}/explain" for user in ("mallory", "alice"))
    site.gateway.restart()
    return beside(site, {"ask": 128}, tokens(site), his, path=hers)


_flood("further: 1,000 polls for orders at the same time", {"poll": 1000}, "job")
_flood(
    "further: tokens that nobody gave out, and credentials that are no good, from the address of another user",
    {"unknown": 100, "credentials": 100},
)


@attack("mallory", "further: questions with 30,000 parameters without end", seen="f19cb47c")
def parameters(site: Site) -> Outcome:
    site.gateway.restart()
    return beside(site, {"ask": 64}, [*tokens(site, 4), ""], "/v1/jobs?" + "a&" * 30_000)


@attack("mallory", "row 14: bodies and headers of 64 MB, deeply nested JSON")
def long_messages(site: Site) -> Outcome:
    token = [site.token("mallory")]
    before = site.gateway.memory_mb()
    outcomes = [beside(site, {what: 6}, token) for what in ("headers", "nested", "bodies")]
    grown = site.gateway.memory_mb() - before
    return Outcome(
        any(each.succeeded for each in outcomes) or grown > MOST_GROWN_MB,
        f"{grown} MB more; " + " | ".join(each.evidence for each in outcomes),
    )
