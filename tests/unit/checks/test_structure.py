"""The measures of structure, on small packages and tests."""

import ast
from pathlib import Path

import pytest

from contrib.checks.structure import (
    constructors,
    crossings,
    cycles,
    duplicates,
    exceeded,
    functions,
    ideas,
    imports,
    modules,
    private_accesses,
)


def graph(folder: Path, **texts: str) -> dict[str, set[str]]:
    for name, text in texts.items():
        path = folder / "house" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    known = modules((folder / "house",))
    return {name: {*imports(name, path, known)} for name, path in known.items()}


@pytest.mark.parametrize(
    "back",
    [
        "import house.a",
        "from house import a",
        "from house.a import thing",
        "from . import a",
        "from .a import thing",
        "def late():\n    from house.a import thing",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.a import Thing",
    ],
)
def test_two_modules_that_import_each_other_are_a_cycle_however_they_do_it(tmp_path: Path, back: str) -> None:
    found = graph(tmp_path, __init__="", a="from house import b", b="from house import c", c=back)
    assert cycles(found) == [["house.a", "house.b", "house.c"]]


def test_a_package_that_passes_on_what_its_modules_define_is_no_cycle(tmp_path: Path) -> None:
    found = graph(tmp_path, __init__="from house.a import thing", a="import house.b", b="import os")
    assert cycles(found) == []


def test_a_module_that_imports_from_the_package_that_imports_it_is_a_cycle(tmp_path: Path) -> None:
    found = graph(tmp_path, __init__="from house.a import thing", a="from house import other")
    assert cycles(found) == [["house", "house.a"]]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("job._restart._keeper", 2),
        ("self._mine; cls._ours", 0),
        ("os._exit(1); row._replace(a=1)", 0),
        ("job.__class__", 0),
        ("monkeypatch.setattr(module, 'LIMIT', 3)", 1),
        ("monkeypatch.setattr('package.module.LIMIT', 3)", 1),
        ("monkeypatch.setattr(module, 'fetch', stand_in)", 0),
        ("monkeypatch.setattr(module, '_fetch', stand_in)", 1),
        ("module.LIMIT = 3", 1),
        ("assert module.LIMIT == 3", 0),
    ],
)
def test_private_names_of_others_and_replaced_constants_are_counted(text: str, count: int) -> None:
    assert len(private_accesses(ast.parse(text))) == count


def test_only_imports_of_crossings_count() -> None:
    text = (
        "from tests.unit.test_a import b\nfrom .test_c import d\nfrom tests.build import job\nimport test_e"
    )
    text += "\nfrom contrib.sites.test_site import f\nfrom tests.unit import test_g\nfrom x import test_name"
    assert len(crossings(ast.parse(text))) == 4


def test_keyword_arguments_of_a_constructor_count_and_self_does_not() -> None:
    text = "class A:\n def __init__(self, a, b=1, *, c, d=2): pass\n def other(self, a, b, c, d, e): pass"
    assert [*constructors(ast.parse(text))] == [(4, "A")]


def test_conditions_within_expressions_make_a_function_complex() -> None:
    text = "def f(a):\n if a and a.b or a.c: return [x for x in a if x]\n return 1 if a else 2\nasync def g(): pass"
    assert sorted(functions(ast.parse(text))) == [(1, "g"), (7, "f")]


def test_ideas_are_counted_by_room() -> None:
    assert ideas("# Ideas\n\n- **cycle**: one; two\n- **apply**: three\n\nGone: four; five") == 3


def test_a_figure_above_its_limit_is_named_and_one_below_is_not() -> None:
    above = exceeded({"cycles": 1, "modules": 7, "lines_tests": 9}, {"cycles": 0, "lines_tests": 9})
    assert [line.split(" (")[0] for line in above] == ["cycles is 1, at most 0"]


def test_names_of_two_classes_and_of_two_modules_are_found_but_not_a_package_s_own(tmp_path: Path) -> None:
    texts = {
        "job/job.py": "class Job: pass\nclass Move: pass",
        "job/__init__.py": "from house.job.job import Job",
        "job/errors.py": "",
        "plan/errors.py": "def make():\n    class Move: pass",
        "plan/path.py": "",
        "path.py": "class Path: pass",
    }
    for name, text in texts.items():
        (tmp_path / "house" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "house" / name).write_text(text)
    assert duplicates(modules((tmp_path / "house",))) == {
        "Move": ["house.job.job.Move", "house.plan.errors.Move"],
        "path": ["house.path", "house.plan.path"],
    }
