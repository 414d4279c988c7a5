"""How values are shown, and which columns survive on a narrow terminal."""

from __future__ import annotations

import io
import math
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from polluxd.cli.output import Column, PrintableConsole, duration, fit, jsonable, number, table


@pytest.mark.parametrize(
    ("show", "value", "shown"),
    [
        (duration, 0, "0s"),
        (duration, 59.4, "59s"),
        (duration, 59.6, "1m00s"),
        (duration, 187, "3m07s"),
        (duration, 7500, "2h05m"),
        (duration, 3 * 86400 + 4 * 3600, "3d04h"),
        *((duration, value, "-") for value in (None, math.nan, math.inf)),
        (number(3), 0, "0"),
        (number(3), 1234.5678, "1235"),
        (number(3), 1.23456, "1.23"),
        (number(3), 0.01234, "0.0123"),
        (number(3), 2.5e7, "2.50e+07"),
        (number(3), -3.14159, "-3.14"),
        *((number(), value, "-") for value in (None, math.nan)),
    ],
)
def test_durations_and_numbers(show, value, shown):
    assert show(value) == shown


COLUMNS = (
    Column("id", "ID", right=True),
    Column("name", "NAME", flexible=True, least=8),
    Column("cheap", "CHEAP", rank=9),
    Column("dear", "DEAR", rank=1),
)
ROW = {"id": 1, "name": "a-rather-long-name", "cheap": "c" * 20, "dear": "d" * 20}


def test_the_cheapest_column_goes_first():
    assert [c.key for c in fit([ROW], COLUMNS, 200)] == ["id", "name", "cheap", "dear"]
    assert [c.key for c in fit([ROW], COLUMNS, 40)] == ["id", "name", "dear"]
    assert [c.key for c in fit([ROW], COLUMNS, 15)] == ["id", "name"]


@given(st.integers(1, 200))
def test_dear_columns_stay_and_order_is_kept(width):
    kept = [c.key for c in fit([ROW], COLUMNS, width)]
    assert kept[:2] == ["id", "name"]
    assert kept == [c.key for c in COLUMNS if c.key in kept]


@pytest.mark.parametrize("width", [20, 42, 55, 66, 80, 200])
def test_only_flexible_columns_are_cut(width):
    wide = "\N{CJK UNIFIED IDEOGRAPH-6771}"  # of two cells
    row = ROW | {"name": "a sentence " * 20, "dear": wide * 10}
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table([row], COLUMNS, width))
    text = console.export_text()
    for column in fit([row], COLUMNS, width):
        assert column.flexible or str(row[column.key]) in text.split()
    assert "\N{HORIZONTAL ELLIPSIS}" in text
    lines = text.splitlines()
    assert len(lines) == 2
    assert max(cell_len(line.rstrip()) for line in lines) <= width


def test_json_has_no_nan_and_no_surprises():
    at = datetime(2024, 1, 1, tzinfo=UTC)
    assert jsonable({"a": math.nan, "b": (1, -math.inf), 3: at}) == {
        "a": None,
        "b": [1, None],
        "3": at.timestamp(),
    }


def test_no_control_character_of_a_user_reaches_the_terminal():
    name = "x\x1b[2J\x1b]0;owned\x07\n\x9b1m\u202e"
    for shown in (table([{"id": 1, "name": name}], COLUMNS, 200), f"job 1 ({name}) stays", Text(name)):
        out = io.StringIO()
        PrintableConsole(file=out, width=200, force_terminal=True, color_system=None).print(shown)
        assert set(out.getvalue()).isdisjoint("\x1b\x07\x9b\u202e")
        assert "\\x1b[2J" in out.getvalue()
