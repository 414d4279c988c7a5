"""CONTRIBUTING.md names the rooms; its walks name real functions."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"^(\d+\.|   -) `([^`]+\.(?:py|sql))`: (.*)$", re.MULTILINE)
FUNCTION = re.compile(r"`([A-Za-z_][\w.]*)`")


def walks() -> dict[str, list[tuple[bool, str, list[str]]]]:
    """By title: of each step whether it is numbered, its file, its functions."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text[text.index("## Two walks") :].split("\n## ")[0]
    found = {}
    for part in re.split(r"^(?=[A-Z].*:$)", section, flags=re.MULTILINE)[1:]:
        steps = [(m[1] != "   -", m[2], FUNCTION.findall(m[3])) for m in STEP.finditer(part)]
        found[part.splitlines()[0]] = steps
    return found


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


def test_there_are_two_walks() -> None:
    assert list(walks()) == [
        "A gradient becomes a goodput table:",
        "An order to grow becomes a new process group:",
    ]


@pytest.mark.parametrize("title", walks())
def test_each_function_of_a_walk_exists(title: str) -> None:
    for _, path, named in walks()[title]:
        assert named, path
        assert set(named) <= functions(ROOT / path), path


@pytest.mark.parametrize("title", walks())
def test_a_walk_does_not_return_to_a_module_that_it_has_left(title: str) -> None:
    outer = [path for numbered, path, _ in walks()[title] if numbered]
    assert len(outer) >= 5
    assert len(set(outer)) == len(outer)


def test_contributing_names_every_room_and_every_module_outside_rooms() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = text[text.index("## Rooms") : text.index("## Two walks")]
    for package in (ROOT / "polluxd", ROOT / "agent" / "pollux"):
        for path in package.iterdir():
            if path.is_dir() and any(path.glob("*.py")):
                assert f"{path.name}/`" in rooms, path
            elif path.suffix == ".py" and path.name != "__init__.py":
                assert f"{path.name}`" in rooms, path
