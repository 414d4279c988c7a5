"""The page of `make fuzz`: tests/benchmarks/fuzz.md."""

from __future__ import annotations

from collections.abc import Collection

WHOLE = 100_000
"""Inputs of a target, from which on a run counts."""

Row = tuple[str, ...]
"""Inputs, seconds, CPU seconds, commit."""

HEAD = """\
# Fuzzing

`make fuzz` feeds each target 100,000 inputs, which its tests share. An input is 4,096 random bytes of a
known seed, which decide what the strategies of the test draw. No input crashed or hung a reader, and none
that makes no sense was accepted. The seconds are of a busy machine; CPU time is without a server's. A test or
target without a row has not had its whole share yet.

| target | test | inputs | seconds | CPU [s] | commit |
|---|---|---:|---:|---:|---|
"""


def with_row(text: str, inputs: int, target: str, tests: Collection[str], test: str, row: Row) -> str:
    """Return the page with the row of one test replaced.

    A run of fewer inputs than `WHOLE` leaves the page as it is, and every run leaves the other targets' rows.

    Args:
        text: the page as it is.
        inputs: of the whole target.
        tests: names of all tests of the target; rows of other tests go.
    """
    if inputs < WHOLE:
        return text
    rows = read_rows(text)
    known = rows.get(_short(target), {})
    rows[_short(target)] = {_short(name): known[_short(name)] for name in tests if _short(name) in known}
    rows[_short(target)][_short(test)] = row
    return _page(rows, _notes(text))


def with_note(text: str, inputs: int, target: str, words: str) -> str:
    """Return the page with a target's line below the table replaced: what else was measured."""
    if inputs < WHOLE:
        return text
    return _page(read_rows(text), [*_notes(text, but=target), f"- {target}: {words}"])


def read_rows(text: str) -> dict[str, dict[str, Row]]:
    """Read the rows of each target and test."""
    rows: dict[str, dict[str, Row]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 6 and cells[2].replace(",", "").isdigit():
            rows.setdefault(cells[0], {})[cells[1]] = tuple(cells[2:])
    return rows


def _notes(text: str, but: str = "") -> list[str]:
    return [line for line in text.splitlines() if line.startswith("- ") and not line.startswith(f"- {but}:")]


def _page(rows: dict[str, dict[str, Row]], notes: list[str]) -> str:
    lines = []
    for target, tests in sorted(rows.items()):
        lines += [f"| {target} | {name} | {' | '.join(row)} |" for name, row in sorted(tests.items())]
        inputs, seconds, cpu_s = (
            sum(float(row[column].replace(",", "")) for row in tests.values()) for column in range(3)
        )
        lines.append(f"| **{target}** | | **{inputs:,.0f}** | **{seconds:.0f}** | **{cpu_s:.0f}** | |")
    return HEAD + "\n".join(lines) + "\n" + "".join(f"\n{note}\n" for note in sorted(notes))


def _short(name: str) -> str:
    return name.removeprefix("test_")
