"""Benchmarks, experiments and suites are code: each can be imported, and what takes seconds runs once.

mypy checks what they call (`make types`). Scripts that act when they are imported are read by their own tests.
"""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polluxd.config.settings import PolicySettings
from polluxd.sim.applications import BUILT_IN

ROOT = Path(__file__).resolve().parents[3]


def acts(path: Path) -> bool:
    """Whether a module does more than define things when it is imported, its `if` for a run as a program aside."""
    calm = (
        ast.Import
        | ast.ImportFrom
        | ast.FunctionDef
        | ast.AsyncFunctionDef
        | ast.ClassDef
        | ast.Assign
        | ast.AnnAssign
    )
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, calm) or (isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)):
            continue
        if isinstance(node, ast.Expr | ast.AugAssign) and (
            isinstance(node, ast.AugAssign)
            or isinstance(node.value, ast.Constant)
            or "environ" in ast.unparse(node.value)
        ):
            continue
        return True
    return False


MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted([*ROOT.glob("tests/benchmarks/*.py"), *ROOT.glob("contrib/**/*.py")])
    if not acts(path)
    and "examples" not in path.parts
    and "hands" not in path.parts
    and path.name != "__main__.py"
]
NOT_INSTALLED = ("playwright",)


@pytest.mark.parametrize("name", MODULES)
def test_a_program_can_be_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in NOT_INSTALLED:
            raise
        pytest.skip(f"{error.name} is installed by the target that needs it")


def test_a_decision_is_measured() -> None:
    from tests.benchmarks.policy import measure

    row = measure(16, 5, PolicySettings(), seeds=1, cycles=4)
    assert (row["gpus"], row["jobs"]) == (16, 5)


def test_parts_of_the_policy_can_be_left_out() -> None:
    from contrib.experiments.policy_ablation import PARTS
    from polluxd.policy import decide
    from tests.unit.policy import every_plan

    for where, instead in PARTS.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, instead)
            decide(every_plan.small(1))


def test_an_honest_life_and_a_day_of_rented_nodes() -> None:
    from tests.benchmarks import cloud
    from tests.benchmarks.honesty import honest_life

    assert not honest_life(3, BUILT_IN, hours=0.5).doubts
    assert cloud.day(next(iter(cloud.RULES.values())), 0)["jobs"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "realloc_large --mb 4 --ranks 2 --moves 2 --kinds DDP --json {out}/r.json",
        "scale --jobs 40 --nodes 8 --cycles 4 --json {out}/s.json",
        "agent_overhead --rounds 1 --minutes 0.01 --kinds ddp --models tokens --step-ms 3",
    ],
)
def test_a_benchmark_runs_at_a_size_of_seconds(words: str, tmp_path: Path) -> None:
    name, *options = words.format(out=tmp_path).split()
    done = subprocess.run(
        [sys.executable, "-m", f"tests.benchmarks.{name}", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'agent'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
