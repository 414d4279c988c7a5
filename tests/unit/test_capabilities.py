"""Nothing that users can name goes, or comes, without a word in the list beside this file.

A limit on lines once took two rival policies of the simulator: no test named them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main

from polluxd.cli.ctl import app as polluxctl
from polluxd.cli.daemon import app as polluxd
from polluxd.config.setting_info import infos
from polluxd.config.settings import SECTIONS
from polluxd.sim.policies import POLICIES

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_suffix(".json")
LISTED: Mapping[str, list[str]] = json.loads(LIST.read_text())


def commands(app: typer.Typer, name: str) -> Iterable[str]:
    command: Any = typer.main.get_command(app)
    return _below(command, command.context_class(command, info_name=name), name)


def _below(group: Any, context: Any, name: str) -> Iterable[str]:
    for word in group.list_commands(context):
        command = group.get_command(context, word)
        if hasattr(command, "list_commands"):
            yield from _below(command, context, f"{name} {word}")
        else:
            yield f"{name} {word}"


def directives() -> Iterable[str]:
    keys = re.search(r"^local KEYS = \{(.*)\}$", (ROOT / "slurm_hooks" / "directives.lua").read_text(), re.M)
    assert keys is not None
    return re.findall(r'"([a-z-]+)"', keys[1])


def integrations() -> Iterable[str]:
    folder = ROOT / "agent" / "pollux" / "integrations"
    return (path.stem for path in folder.glob("[!_]*.py") if not path.stem.endswith("_state"))


KINDS: Mapping[str, Callable[[], Iterable[str]]] = {
    "simulated policies": lambda: POLICIES,
    "directives": directives,
    "commands": lambda: [*commands(polluxctl, "polluxctl"), *commands(polluxd, "polluxd")],
    "integrations": integrations,
    "settings": lambda: (f"{section}.{info.key}" for section in SECTIONS for info in infos(section)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_is_listed_is_there_and_all_that_is_there_is_listed(kind):
    listed, found = set(LISTED[kind]), set(KINDS[kind]())
    assert not listed - found, f"gone; take it from {LIST.name} only with a line in CHANGELOG.md"
    assert not found - listed, f"new; list it in {LIST.name}, so that it cannot get lost"
