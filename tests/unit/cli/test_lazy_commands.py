"""polluxctl imports what the command that is called needs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import typer.main

from pollux.version import __version__
from polluxd.cli import ctl

GROUP: Any = typer.main.get_command(ctl.app)
CONTEXT: Any = GROUP.context_class(GROUP, info_name="polluxctl")


def loaded_by(*words: str) -> set[str]:
    """Return the modules that a run of polluxctl has loaded at its end."""
    program = (
        "import atexit, sys; atexit.register(lambda: print('LOADED', *sys.modules))\n"
        f"sys.argv = {['polluxctl', *words]!r}\n"
        "from polluxd.cli.ctl import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return set(done.stdout.partition("LOADED ")[2].split())


def test_help_loads_neither_solver_nor_database():
    loaded = loaded_by("--help")
    assert "typer" in loaded
    assert loaded.isdisjoint(
        {"numpy", "scipy", "sqlalchemy", "psycopg2", "pydantic", "polluxd.config.config_file"}
    )


def test_status_loads_no_solver(tmp_path):
    loaded = loaded_by("status", "--config", str(tmp_path / "none.toml"))
    assert "polluxd.store" in loaded
    assert loaded.isdisjoint(
        {"numpy", "scipy", "polluxd.policy", "polluxd.daemon", "prometheus_client", "polluxd.sim"}
    )


@pytest.mark.parametrize("name", ctl.COMMANDS)
def test_the_listed_summary_is_the_commands_own(name):
    command = ctl.COMMANDS[name]
    module, _, attribute = command.place.partition(":")
    found = getattr(import_module(f"polluxd.cli.{module}"), attribute)
    said = inspect.getdoc(found) if inspect.isfunction(found) else found.info.help
    assert said.splitlines()[0].startswith(command.summary)
    assert GROUP.get_command(CONTEXT, name).name == name


def test_help_ends_with_the_example(polluxctl):
    assert polluxctl("pin", "--help").out.rstrip().endswith("Example: polluxctl pin 1234")
    replay = polluxctl("decisions", "replay", "--help").out.rstrip()
    assert replay.endswith("Example: polluxctl decisions replay 567")


def test_version(polluxctl):
    assert polluxctl("--version").out == f"polluxctl {__version__}\n"


@pytest.mark.parametrize(
    ("word", "hint"), [("stats", "did you mean 'status'?"), ("frobnicate", "see `polluxctl --help`")]
)
def test_an_unknown_command_names_the_nearest_one(polluxctl, word, hint):
    said = polluxctl(word)
    assert (said.status, said.err) == (2, f"polluxctl: there is no command '{word}'; {hint}\n")


def test_a_group_without_a_command_prints_its_help(polluxctl):
    said = polluxctl("settings")
    assert said.status == 2
    assert "\n  preview " in said.err
