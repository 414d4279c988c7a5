"""Users' text as others may see it."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polluxd.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("train", "train"),
        ("résumé 训练 🙂", "résumé 训练 🙂"),
        ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("\x9b2J\x7f", "\\x9b2J\\x7f"),
        ("abc\u202ecba\u200b\u2028", "abc\\u202ecba\\u200b\\u2028"),
    ],
)
def test_what_moves_a_cursor_is_shown_as_its_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_nothing_harmful_is_left(text: str) -> None:
    assert {unicodedata.category(c) for c in printable(text)}.isdisjoint({"Cc", "Cf", "Cs", "Zl", "Zp"})
