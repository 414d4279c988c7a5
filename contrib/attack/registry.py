"""What an attack is, and the list of them.

A theme is a file of functions; `__main__` lists the themes. A new attack is one function:

    @attack("mallory", "a name stops polluxd")
    def name_stops_polluxd(site: Site) -> Outcome:
        ...

It must not succeed. One that returns answers of the gateway succeeds if it was let in once. `seen` names the commit at
which it succeeded: 386fa591 had a second half of this suite, which switched each defence off and attacked again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from contrib.attack.messages import Answer
from contrib.attack.site import Site


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an attempt."""

    succeeded: bool
    evidence: str
    """What was seen, in words that a reader can check."""


Attempt = Callable[[Site], Outcome | list[Answer]]


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    actor: str
    attempt: Attempt
    seen: str
    """The commit at which the attack was seen to succeed, on its product or with the defence switched off."""

    @property
    def theme(self) -> str:
        """The file that the attack stands in."""
        return self.attempt.__module__.rpartition(".")[2]


ATTACKS: list[Attack] = []


def attack(actor: str, name: str, seen: str = "386fa591, defence off") -> Callable[[Attempt], Attempt]:
    """Add a function to the list of attacks."""

    def enlist(attempt: Attempt) -> Attempt:
        ATTACKS.append(Attack(name, actor, attempt, seen))
        return attempt

    return enlist
