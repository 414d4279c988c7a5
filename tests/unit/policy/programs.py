"""Parts of the policy taken away, so that a plan and its bound can be compared with those without."""

from __future__ import annotations

import pytest

from polluxd.policy import assignment, choice, patterns, price


def limit_assignment(patch: pytest.MonkeyPatch, most: int) -> None:
    """Let the program over nodes have `most` variables."""
    patch.setattr(assignment, "MOST_PARTS", most)


def without_patterns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(patterns, "MOST_OPTIONS", 0)


def without_racks(patch: pytest.MonkeyPatch) -> None:
    """Choose by prices, which know no racks."""
    patch.setattr(choice, "MOST_VARIABLES", 0)


def by_prices(patch: pytest.MonkeyPatch) -> None:
    """Take away what the exact programs settle at the margin, down to very few jobs."""
    patch.setattr(price, "EXACT_WORK", 0)
    patch.setattr(price, "CORE_JOBS", 4)
