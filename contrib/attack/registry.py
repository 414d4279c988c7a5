"""What an attack is, and the list of them.

A theme is a file of functions; `__main__` lists the themes. A new attack is one function:

    @attack("mallory", "a name stops polluxd")
    def name_stops_polluxd(site: Site, defended: bool) -> Outcome:
        ...

It is called twice: with `defended=False`, where it has to succeed, and with `defended=True`, where it must not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from contrib.attack.site import Site


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an attempt."""

    succeeded: bool
    evidence: str
    """What was seen, in words that a reader can check."""


Attempt = Callable[[Site, bool], Outcome]
Made = TypeVar("Made", bound=Callable[..., Outcome])


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    actor: str
    attempt: Attempt

    @property
    def theme(self) -> str:
        """The file that the attack stands in."""
        return self.attempt.__module__.rpartition(".")[2]


ATTACKS: list[Attack] = []


def attack(actor: str, name: str) -> Callable[[Made], Made]:
    """Add a function to the list of attacks."""

    def enlist(attempt: Made) -> Made:
        ATTACKS.append(Attack(name, actor, attempt))
        return attempt

    return enlist
