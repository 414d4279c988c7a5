"""The tests that a changed file stands for."""

import pytest

from contrib.checks.changed import covering


@pytest.mark.parametrize(
    ("name", "tests"),
    [
        ("agent/pollux/data/loader.py", ["tests/unit/agent/data"]),
        ("agent/pollux/goodput.py", ["tests/unit/goodput"]),
        ("polluxd/policy/packing.py", ["tests/unit/policy"]),
        ("polluxd/cycle/snapshot.py", ["tests/unit/cycle"]),
        ("polluxd/daemon.py", ["tests/unit/test_daemon.py"]),
        ("slurm_hooks/job_submit.lua", ["tests/unit/slurm"]),
        ("tests/unit/agent/ranks/test_world.py", ["tests/unit/agent/ranks/test_world.py"]),
        ("tests/unit/agent/conftest.py", ["tests/unit/agent"]),
        ("tests/unit/a_module_that_is_gone/test_it.py", []),
        ("README.md", []),
    ],
)
def test_a_changed_file_stands_for_the_tests_of_its_room(name: str, tests: list[str]) -> None:
    assert covering(name) == tests


def test_a_module_that_tests_share_stands_for_the_tests_that_import_it() -> None:
    found = covering("tests/unit/agent/regression.py")
    assert "tests/unit/agent/loop/test_session.py" in found
    assert "tests/unit/agent/data/test_data.py" not in found
    assert "tests/unit/policy/test_domains.py" in covering("tests/build.py")


def test_every_room_of_the_agent_and_the_daemon_has_tests_of_its_name() -> None:
    for room in (
        "checkpoint",
        "launcher",
        "learning_rate",
        "loop",
        "noise",
        "ranks",
        "resize",
        "scheduler",
        "tuning",
    ):
        assert covering(f"agent/pollux/{room}/any.py")
    for room in ("apply", "cli", "policy", "slurm", "store"):
        assert covering(f"polluxd/{room}/any.py")
