"""The page of trainers with a loop of their own says what the table of trainers says."""

from __future__ import annotations

from pathlib import Path

from pollux.wrap.trainers import table

PAGE = Path(__file__).resolve().parents[4] / "docs/user-guide/own-loop.md"


def test_the_page_has_the_table_of_trainers():
    assert table() in PAGE.read_text()
