"""Write the reference pages that come from code.

`conf.py` calls `write` before each build. Git ignores the pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from typer.cli import get_docs_for_click

from polluxd.cli.ctl import app as polluxctl
from polluxd.cli.daemon import app as polluxd
from polluxd.store.sqlfiles import migrations

ROOT = Path(__file__).resolve().parents[1]
PAGES = Path(__file__).resolve().parent / "reference"

_FUNCTION = re.compile(
    r"(?P<comment>(?:^-- .*\n)*)^CREATE (?:OR REPLACE )?FUNCTION pollux\.(?P<name>\w+)\((?P<arguments>[^)]*)\)\s+"
    r"RETURNS\s+(?P<returns>\w+)",
    re.MULTILINE,
)


def commands(app: typer.Typer, name: str) -> str:
    """Return the page of one command-line program."""
    command = typer.main.get_command(app)
    context: Any = command.context_class(command, info_name=name)
    return get_docs_for_click(obj=command, ctx=context, name=name, title=f"`{name}`")  # type: ignore[arg-type]


def sql_functions(texts: list[str]) -> str:
    """Return the page of the SQL functions that agents may call.

    A function without a comment of its own has the comment of the inner function of the same name.
    """
    found = {m["name"]: m for text in texts for m in _FUNCTION.finditer(text)}
    lines = [
        "# SQL functions",
        "",
        "A job's agent may call these functions and nothing else. Each checks the ticket first: cluster, job, attempt, "
        "uid and token. They never change a row: polluxd reads what they add.",
    ]
    for name, function in sorted(found.items()):
        if not name.endswith("_v1"):
            continue
        inner = found.get(name.removesuffix("_v1"))
        comment = function["comment"] or (inner["comment"] if inner else "")
        arguments = re.sub(r"\s+", " ", function["arguments"]).strip()
        lines += [
            "",
            f"## `{name}`",
            "",
            " ".join(line.removeprefix("-- ") for line in comment.splitlines()),
            "",
            "```sql",
            f"pollux.{name}({arguments}) RETURNS {function['returns']}",
            "```",
        ]
    return "\n".join(lines) + "\n"


def _pages() -> Iterator[tuple[str, str]]:
    yield "polluxctl.md", commands(polluxctl, "polluxctl")
    yield "polluxd.md", commands(polluxd, "polluxd")
    yield "sql-functions.md", sql_functions([migration.text for migration in migrations()])


def write() -> None:
    """Write every page that has changed, so that Sphinx reads no other again."""
    for name, text in _pages():
        path = PAGES / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
