"""The changes that a mutation run makes."""

import pytest

from contrib.mutation.__main__ import ROOMS, covering, equivalents, left_of, modules, sample
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


def test_tests_that_import_the_module_come_first() -> None:
    users, others = covering("agent/pollux/noise/pair_norms.py", "tests/unit/agent/noise")
    assert "tests/unit/agent/noise/test_pair_norms.py" in users
    assert len(others) > 3
    assert not set(users) & set(others)


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
