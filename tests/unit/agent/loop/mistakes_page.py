"""The page of common mistakes, which quotes messages."""

from __future__ import annotations

from pathlib import Path

PAGE = " ".join((Path(__file__).parents[4] / "docs/user-guide/common-mistakes.md").read_text().split())


def on_the_page(told: object) -> bool:
    """Whether docs/user-guide/common-mistakes.md quotes the message."""
    return " ".join(str(told).split()) in PAGE
