"""The walks in CONTRIBUTING.md name functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"^(?:\d+\.|   -) `([^`]+\.(?:py|sql))`: (.*)$", re.MULTILINE)
FUNCTION = re.compile(r"`([A-Za-z_][\w.]*)`")
STEPS = STEP.findall((ROOT / "CONTRIBUTING.md").read_text())


def functions(path: Path) -> set[str]:
    text = path.read_text()
    if path.suffix == ".sql":
        return set(re.findall(r"CREATE FUNCTION pollux\.(\w+)", text))
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return names


@pytest.mark.parametrize(("path", "text"), STEPS)
def test_each_function_of_a_walk_exists(path: str, text: str) -> None:
    named = FUNCTION.findall(text)
    assert named
    assert set(named) <= functions(ROOT / path)


def test_steps_are_found() -> None:
    assert len(STEPS) > 20
