"""Checked rows of CSV files.

An error names the file, the line and the remedy.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from polluxd.errors import ConfigError


class TraceError(ConfigError):
    """A trace or a profile is not usable."""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a CSV file, and where it stands."""

    path: Path
    number: int
    """As an editor counts: the header is line 1."""
    values: dict[str, str]

    def fault(self, what: str, remedy: str) -> TraceError:
        return TraceError(f"{self.path}, line {self.number}: {what}; {remedy}")

    def text(self, column: str) -> str:
        value = (self.values.get(column) or "").strip()
        if not value:
            raise self.fault(f"no {column}", f"give the {column}, or remove the line")
        return value

    def number_in(self, column: str, low: float, high: float = math.inf) -> float:
        """A finite number from `low` to `high`."""
        value = self.text(column)
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not low <= number <= high or math.isinf(number):
            most = "" if math.isinf(high) else f" to {high:g}"
            raise self.fault(f"{column} is {value!r}", f"expected a number from {low:g}{most}")
        return number

    def whole(self, column: str, low: int) -> int:
        """A whole number from `low`."""
        number = self.number_in(column, low)
        if number != int(number):
            raise self.fault(f"{column} is {number:g}", "expected a whole number")
        return int(number)


def lines(path: Path, columns: Sequence[str], *, delimiter: str = ",") -> Iterator[Line]:
    """Yield the rows of a file with at least these columns, in order.

    Raises TraceError, and nothing else.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, delimiter=delimiter)
            found = [name.strip() for name in reader.fieldnames or []]
            missing = [name for name in columns if name not in found]
            if missing:
                raise TraceError(
                    f"{path}, line 1: no column {' or '.join(missing)} among {', '.join(found) or 'none'}; "
                    f"the header must name {', '.join(columns)}"
                )
            reader.fieldnames = found
            for row in reader:
                if any(value for value in row.values()):
                    yield Line(path, reader.line_num, row)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: is not a CSV file in UTF-8 ({error}); export it again") from None
