"""Only a whole run of `make fuzz` writes in its page, and only its rows."""

from __future__ import annotations

from tests.fuzz.page import HEAD, WHOLE, read_rows, with_row

ROW = ("50,000", "12.5", "10.1", "abc1234")
PAGE = with_row(HEAD, WHOLE, "test_tickets", ["test_a", "test_b"], "test_a", ROW)


def test_a_run_with_fewer_inputs_leaves_the_page_as_it_is() -> None:
    other = ("6", "1", "1", "def5678")
    assert with_row(PAGE, WHOLE - 1, "test_tickets", ["test_a", "test_b"], "test_a", other) == PAGE


def test_runs_one_by_one_add_up() -> None:
    page = with_row(PAGE, WHOLE, "test_tickets", ["test_a", "test_b"], "test_b", ROW)
    page = with_row(page, WHOLE, "test_reports", ["test_c"], "test_c", ROW)
    assert read_rows(page) == {"reports": {"c": ROW}, "tickets": {"a": ROW, "b": ROW}}
    assert "| **tickets** | | **100,000** | **25** | **20** | |" in page


def test_the_row_of_a_test_that_is_gone_goes() -> None:
    page = with_row(PAGE, WHOLE, "test_tickets", ["test_b"], "test_b", ROW)
    assert read_rows(page) == {"tickets": {"b": ROW}}
