"""Find which statements of a room's modules each of the room's tests runs.

A copy of the modules sets a byte of a shared file before each statement of a function. Threads and processes that a
test starts set the same bytes.
"""

from __future__ import annotations

import ast
import json
import mmap
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from contrib.mutation.mutants import Mutant, line_starts, span


@dataclass(frozen=True)
class TestRun:
    """One test of a room that passes: the statements, by number, that it runs."""

    __test__ = False
    name: str
    seconds: float
    statements: frozenset[int]


@dataclass
class MarkedRoom:
    """The marked modules of a room, and its tests once they have run there.

    `spans` gives each statement's bytes, by module and by number.
    """

    modules: dict[str, bytes] = field(default_factory=dict)
    spans: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)
    tests: list[TestRun] = field(default_factory=list)

    def tests_of(self, module: str, mutant: Mutant) -> list[TestRun]:
        """Return the tests that run the mutant's statement, the quickest first.

        These are all tests of the room where none has set the statement's mark.
        """
        around = [
            (stop - start, number)
            for number, (start, stop) in self.spans[module].items()
            if start <= mutant.start < stop
        ]
        statement = min(around, default=(0, -1))[1]
        found = [test for test in self.tests if statement in test.statements]
        return sorted(found or self.tests, key=lambda test: test.seconds)


def mark(sources: Mapping[str, bytes], shared: Path) -> MarkedRoom:
    """Mark the statements of these modules; size the shared file for them."""
    room, count = MarkedRoom(), 0
    for module, source in sources.items():
        tree, starts = ast.parse(source), line_starts(source)
        room.spans[module] = {}
        for block in _blocks(tree):
            marked: list[ast.stmt] = []
            for statement in block:
                if marked or not _is_text(statement):
                    room.spans[module][count] = span(statement, starts)
                    marked += ast.parse(f"_ran[{count}] = 1").body
                    count += 1
                marked.append(statement)
            block[:] = marked
        top = sum(_is_text(node) or getattr(node, "module", "") == "__future__" for node in tree.body)
        opened = f"_ran = __import__('mmap').mmap(__import__('os').open({str(shared)!r}, 2), 0)"
        tree.body[top:top] = ast.parse(opened).body
        room.modules[module] = ast.unparse(tree).encode()
    shared.write_bytes(bytes(max(count, 1)))
    return room


def _blocks(tree: ast.Module) -> list[list[ast.stmt]]:
    """Return each list of statements inside functions, once."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lists = (
        getattr(node, name, None)
        for function in functions
        for node in ast.walk(function)
        for name in ("body", "orelse", "finalbody")
    )
    return list({id(block): block for block in lists if isinstance(block, list)}.values())


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class Recorder:
    """A pytest plugin that writes the statements of each test to a JSON file."""

    def __init__(self, shared: Path, answer: Path) -> None:
        with shared.open("r+b") as file:
            self._marks = mmap.mmap(file.fileno(), 0)
        self._answer = answer
        self._found: dict[str, tuple[float, list[int]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._marks[:] = bytes(len(self._marks))
        began = time.monotonic()
        result = yield
        seconds = time.monotonic() - began
        self._found[item.nodeid] = seconds, [n for n, byte in enumerate(self._marks[:]) if byte]
        return result

    def pytest_sessionfinish(self) -> None:
        self._answer.write_text(json.dumps(self._found))


def read(answer: Path) -> list[TestRun]:
    """Read what a `Recorder` has written."""
    found: dict[str, tuple[float, list[int]]] = json.loads(answer.read_text())
    return [TestRun(name, seconds, frozenset(statements)) for name, (seconds, statements) in found.items()]
