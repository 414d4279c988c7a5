"""`make check` looks at every file of the tree."""

from __future__ import annotations

import subprocess

from contrib.checks.changed import ROOT, SILENT, covering


def test_every_file_of_the_tree_has_a_test() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    assert len(files) > 500
    assert [name for name in files if not SILENT.fullmatch(name) and not covering(name)] == []


def test_a_room_has_its_own_tests_and_what_is_new_has_none() -> None:
    assert covering("polluxd/sim/engine.py") == ["tests/sim"]
    assert covering("polluxd/policy/decision.py") == ["tests/unit/policy"]
    assert covering("agent/pollux/noise/reduction.py") == ["tests/unit/agent/noise"]
    assert covering("agent/pollux/integrations/jax.py") == ["tests/integration/integrations"]
    assert covering("agent/pollux/errors.py") == ["tests/unit/agent/loop/test_bad_input.py"]
    assert covering("polluxd/newroom/thing.py") == []
    assert covering("somewhere/else.c") == []
