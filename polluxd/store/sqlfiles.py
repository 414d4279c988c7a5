"""The plain-SQL files: where they are, and the named queries in them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from polluxd.errors import StoreRejected

_NAME = re.compile(r"^-- name: (\w+)$")


@dataclass(frozen=True, slots=True)
class SqlFile:
    """One numbered migration."""

    name: str
    text: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@cache
def sql_directory() -> Path:
    """Return the directory of the SQL files.

    In an installed package this is `_sql` inside it; in a checkout it is `sql` beside the package.

    Raises:
        StoreRejected: neither directory holds the queries.
    """
    package = Path(__file__).resolve().parent.parent
    places = (package / "_sql", package.parent / "sql")
    for place in places:
        if (place / "queries.sql").is_file():
            return place
    raise StoreRejected(
        f"expected the SQL files in {places[0]} or {places[1]}, found none: reinstall polluxd"
    )


def migrations() -> list[SqlFile]:
    """The numbered migrations, in order. Together they make the schema of a new database."""
    files = sorted((sql_directory() / "migrations").glob("[0-9][0-9][0-9][0-9]_*.sql"))
    return [SqlFile(path.stem, path.read_text()) for path in files]


def roles() -> str:
    """The script that makes the database roles."""
    return (sql_directory() / "roles.sql").read_text()


@cache
def queries() -> dict[str, str]:
    """Query by name, from queries.sql."""
    return parse_queries((sql_directory() / "queries.sql").read_text())


def parse_queries(text: str) -> dict[str, str]:
    """Split a file into queries at its `-- name: NAME` lines.

    Comments are removed, since a `:word` in a comment would be a parameter.

    Raises:
        ValueError: a name twice, or statements before the first name.
    """
    found: dict[str, list[str]] = {}
    name = None
    for line in text.splitlines():
        if match := _NAME.match(line):
            name = match[1]
            if name in found:
                raise ValueError(f"query {name} is defined twice")
            found[name] = []
        elif line.strip() and not line.lstrip().startswith("--"):
            if name is None:
                raise ValueError(f"SQL before the first `-- name:` line: {line.strip()!r}")
            found[name].append(line)
    return {name: "\n".join(lines).rstrip().removesuffix(";") for name, lines in found.items()}
