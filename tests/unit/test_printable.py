"""Users' text on terminals and in logs."""

from __future__ import annotations

import logging
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polluxd.printable import PrintableFormatter, printable


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


def test_a_log_record_is_one_line_and_a_traceback_keeps_its_own() -> None:
    form = PrintableFormatter("%(levelname)s %(message)s")
    record = logging.LogRecord("x", logging.INFO, "f", 1, "job %s", ("a\nINFO forged \x1b[2J",), None)
    assert form.format(record) == "INFO job a\\nINFO forged \\x1b[2J"
    try:
        raise ValueError("bad \x1b[1m")
    except ValueError:
        record.exc_info = sys.exc_info()
    lines = form.format(record).split("\n")
    assert lines[-1] == "ValueError: bad \\x1b[1m"
    assert len(lines) > 3
