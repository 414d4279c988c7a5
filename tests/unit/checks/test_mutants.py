"""The changes that a mutation run makes."""

from typing import Any

import pytest

from contrib.mutation.__main__ import ROOMS, equivalents, left_of, modules, sample
from contrib.mutation.marks import TestRun, mark
from contrib.mutation.mutants import mutants
from contrib.mutation.server import ROOT, Server


def changes(body: str) -> list[str]:
    source = f"def f(a, b):\n    {body}\n".encode()
    found = []
    for mutant in mutants(source):
        changed = mutant.apply(source)
        compile(changed, "mutant", "exec")
        found.append(changed.decode().split("\n", 1)[1].strip())
    return found


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("x = a < b", ["x = (a <= b)"]),
        ("x = a + b", ["x = (a - b)"]),
        ("x = not a", ["x = (a)"]),
        ("x = a and b", ["x = (a or b)"]),
        ("x = 3", ["x = 4"]),
        ("x = True", ["x = False"]),
        ("x = min(a, b)", ["x = max(a, b)"]),
        ("return a", ["return None"]),
        ("return None", []),
        ("a()", ["pass"]),
        ("a += b", ["pass"]),
        ("log.info('%d', a + 1)", []),
        ("raise ValueError(a + 1)", []),
        ("assert a < b", []),
        ("x = 'text'", []),
        ("x = f'{a + 1}'", []),
        ("x = zip(a, b, strict=True)", []),
    ],
)
def test_each_kind_of_change_is_made_where_a_test_could_see_it(body: str, expected: list[str]) -> None:
    assert changes(body) == expected


def test_a_condition_is_turned_round() -> None:
    assert "if (not (a)):" in changes("if a:\n        b()")[0]


def test_code_outside_functions_stays() -> None:
    assert mutants(b"LIMIT = 3 + 4\nclass A:\n    size: int = 3\n") == []


def test_a_mutant_is_named_by_its_function_and_drawn_by_the_seed() -> None:
    module = "polluxd/apply/leases.py"
    first = [str(m) for m in sample(module, 5, 0, set())]
    assert first == [str(m) for m in sample(module, 5, 0, set())]
    assert len(first) == 5
    assert all(name.startswith(("Leases.", "kept_back: ")) for name in first)
    assert first[0] not in [str(m) for m in sample(module, 100, 0, {(module, first[0])})]


SOURCE = b'''"""Text."""
from __future__ import annotations
def f(a):
    """Text."""
    if a:
        return 3
    elif a is None:
        return 4
    return 5
'''


@pytest.mark.parametrize(("given", "changed"), [(1, "3"), (None, "4"), (0, "5")])
def test_a_test_runs_the_mutants_of_the_statements_that_it_has_marked(given, changed, tmp_path) -> None:
    shared = tmp_path / "marks"
    room = mark({"f.py": SOURCE}, shared)
    marked: dict[str, Any] = {}
    exec(compile(room.modules["f.py"], "f.py", "exec"), marked)
    assert marked["f"](given) == int(changed)
    ran = frozenset(number for number, byte in enumerate(shared.read_bytes()) if byte)
    room.tests = [TestRun("other", 0.1, frozenset()), TestRun("this", 1.0, ran)]
    found = {str(m): [test.name for test in room.tests_of("f.py", m)] for m in mutants(SOURCE)}
    of_numbers = {m.removeprefix("f: ")[0]: names for m, names in found.items() if m[3].isdigit()}
    # Without a test that runs the statement, all of the room are tried, the quickest first.
    assert of_numbers == {
        number: ["this"] if number == changed else ["other", "this"] for number in ("3", "4", "5")
    }
    assert found["f: a -> (not (a))"] == ["this"]


def test_every_room_has_modules_and_tests_and_every_equivalent_mutant_exists() -> None:
    assert {folder for _, folder in modules([])} == {*ROOMS.values()}
    for module, name in equivalents():
        assert name in [str(m) for m in mutants((ROOT / module).read_bytes())], (
            f"no mutant of {module}: {name}"
        )


def test_the_survivors_of_a_run_are_found_again_and_equivalent_ones_left_out() -> None:
    module = "agent/pollux/data/plan.py"
    names = [str(mutant) for mutant in sample(module, 6, 0, set())]
    assert {str(mutant) for mutant in left_of(module, names, set())} == set(names)
    assert names[0] not in [str(mutant) for mutant in left_of(module, names, {(module, names[0])})]
    assert left_of(module, ["of_old: 0 -> 1"], set()) == []


def test_servers_end_in_any_order() -> None:
    servers = [Server(loaded=()), Server(loaded=())]
    for server in servers:
        server.close()
        assert not server.folder.exists()
