"""Weights of accounts and users that follow Slurm's shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from polluxd.errors import SlurmGarbled

LEAST_WEIGHT, LARGEST_WEIGHT = 0.001, 1000.0


@dataclass(frozen=True)
class ShareWeights:
    """Weights by Slurm's shares; their mean is 1, over accounts and over the users of each account."""

    accounts: Mapping[str, float]
    users: Mapping[str, float]
    differing: frozenset[str]
    """Users whose share differs by account: one weight cannot say that."""


@dataclass(frozen=True)
class _Association:
    account: str
    parent: str
    user: str
    share: float | None
    """None: "parent", no share of its own."""


def read_shares(ask: Callable[..., str], cluster: str) -> ShareWeights:
    """Ask slurmdbd for the shares (Fairshare= of sacctmgr) of a cluster. Raises SlurmError."""
    fields = "format=account,parentname,user,share"
    text = ask("sacctmgr", "--noheader", "--parsable2", "show", "associations", f"clusters={cluster}", fields)
    found = [_association(line) for line in text.splitlines() if line]
    parts = {name: _part(name, found) for name in {a.account for a in found if a.user}}
    accounts = _around_one(parts)
    by_user: dict[str, set[float]] = {}
    for name in parts:
        shares = {a.user: a.share for a in found if a.account == name and a.user and a.share is not None}
        for user, weight in _around_one(shares).items():
            by_user.setdefault(user, set()).add(weight)
    users = {user: next(iter(weights)) for user, weights in by_user.items() if len(weights) == 1}
    return ShareWeights(accounts, users, frozenset(by_user.keys() - users.keys()))


def _association(line: str) -> _Association:
    words = line.split("|")
    if len(words) != 4 or not (words[3] == "parent" or words[3].isdecimal()):
        raise SlurmGarbled(f"expected account|parent|user|share, got {line[:80]!r}")
    account, parent, user, share = words
    return _Association(account, parent, user, None if share == "parent" else float(share))


def _part(name: str, associations: list[_Association]) -> float:
    """Return the part of the cluster that an account's own users have.

    At each level of the tree, the accounts and users below an account divide its part by their shares.
    """
    parent_of = {a.account: a.parent for a in associations if not a.user}
    below: dict[str, dict[str, float]] = {}
    for a in associations:
        below.setdefault(a.account if a.user else a.parent, {})[a.user or f"account {a.account}"] = (
            a.share or 0.0
        )
    own = below.get(name, {})
    part = sum(share for child, share in own.items() if not child.startswith("account ")) / (
        sum(own.values()) or 1.0
    )
    seen = {name}
    while parent := parent_of.get(name):
        siblings = below[parent]
        part *= siblings[f"account {name}"] / (sum(siblings.values()) or 1.0)
        name = parent
        if name in seen:
            raise SlurmGarbled(f"expected a tree of accounts, got {name} above itself")
        seen.add(name)
    return part


def _around_one(parts: Mapping[str, float]) -> dict[str, float]:
    """Scale so that the mean is 1, to three digits, within the bounds of a weight."""
    total = sum(parts.values())
    return {
        name: min(max(float(f"{part * len(parts) / total:.3g}"), LEAST_WEIGHT), LARGEST_WEIGHT)
        if total
        else 1.0
        for name, part in sorted(parts.items())
    }
