"""The named queries and the numbered migrations, as files."""

from __future__ import annotations

import re

import pytest

from polluxd.store import sqlfiles
from polluxd.store.sqlfiles import migrations, parse_queries, queries


def test_queries_by_name_without_comments_or_semicolons():
    text = "-- file\n\n-- name: one\n-- about :this\nSELECT 1\nWHERE x = :y;\n\n-- name: two\nSELECT 2;\n"
    assert parse_queries(text) == {"one": "SELECT 1\nWHERE x = :y", "two": "SELECT 2"}


@pytest.mark.parametrize(
    "text", ["SELECT 1;\n-- name: one\n", "-- name: a\nSELECT 1;\n-- name: a\nSELECT 2;"]
)
def test_a_file_that_would_lose_a_query_is_refused(text):
    with pytest.raises(ValueError, match=r"before|twice"):
        parse_queries(text)


def test_every_query_that_the_code_names_exists_and_none_is_left_over():
    package = sqlfiles.sql_directory().parent / "polluxd" / "store"
    named = set()
    for path in package.glob("*.py"):
        named |= set(re.findall(r"(?:\brun|_query|_run|_ask)\(\s*\"(\w+)\"", path.read_text()))
    assert named == set(queries())


def test_every_query_keeps_to_its_cluster():
    # set_who touches no table, allocations hang on a cycle, which has the cluster, and clusters share schema and roles.
    exempt = {"set_who", "record_allocations", "applied_migrations"}
    assert {name for name, sql in queries().items() if ":cluster" not in sql} == exempt


def test_migrations_are_numbered_without_a_gap():
    names = [m.name for m in migrations()]
    assert [int(name[:4]) for name in names] == list(range(1, 1 + len(names)))
    assert len({m.checksum for m in migrations()}) == len(names)


def test_what_users_ask_for_is_bounded():
    """Every statement that a question of a user causes has a LIMIT, or is of one row by its key."""
    package = sqlfiles.sql_directory().parent / "polluxd" / "store"
    asked = set(re.findall(r"(?:\brun|_ask)\(\s*\"(\w+)\"", (package / "people.py").read_text()))
    texts = {name: queries()[name] for name in asked}
    reads = {name: text for name, text in texts.items() if text.lstrip().startswith(("SELECT", "WITH"))}
    bounded = re.compile(r"LIMIT \S+\s*(\) \w+\s*ORDER BY [\w., ]+|\) \w.*)?")
    one_row = {"cycle", "cycle_snapshot", "leader", "pin_of", "move_to_cancel", "set_who"}
    by_day = {"rentals"}  # administrators ask for it
    thinned = {"report_history"}  # tests/integration/store/test_bounds.py
    assert {name for name, text in reads.items() if not bounded.search(text)} <= one_row | by_day | thinned
