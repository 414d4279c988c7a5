"""The programs accept every polluxctl and polluxd call in the pages, and make has every target."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from polluxd.cli.ctl import COMMANDS
from polluxd.cli.ctl import app as polluxctl
from polluxd.cli.daemon import app as polluxd

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "slurm_hooks/*.md", "contrib/**/*.md")
    for page in ROOT.glob(pattern)
    # Old entries of the change log name commands of their time. A build generates pages from the programs.
    if page.name not in ("CHANGELOG.md", "polluxctl.md", "polluxd.md") and "_build" not in page.parts
)
PROGRAMS = {"polluxctl": typer.main.get_command(polluxctl), "polluxd": typer.main.get_command(polluxd)}
FENCE = re.compile(r"^( *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^ *```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")


def calls(text: str) -> list[str]:
    """The calls in code spans, in code blocks and in indented lines."""
    blocks = [line for m in FENCE.finditer(text) for line in m["body"].splitlines()]
    blocks += [line for line in text.splitlines() if line.startswith("    ")]
    candidates = SPAN.findall(FENCE.sub("", text)) + blocks
    found = (
        re.match(r"(?:\$ |# |sudo )?((?:polluxctl|polluxd) [a-z-].*)", line.strip()) for line in candidates
    )
    # In a list of commands, the meaning follows after spaces; a comment after a hash; a pipe feeds another program.
    return [re.split(r"\s{2,}|\s#|\s[|>]", m[1])[0].strip() for m in found if m]


def fault(call: str) -> str:
    """What the program would refuse in a call; empty where it would accept it."""
    program, *words = shlex.split(call)
    command: Any = PROGRAMS[program]
    while hasattr(command, "list_commands"):
        if not words:
            return ""
        if words[0] in ("--help", "-h", "--install-completion"):
            return ""
        context = command.context_class(command, info_name=program)
        inner = command.get_command(context, words[0])
        if inner is None:
            return f"{program} has no command {words[0]}"
        command = inner
        words.pop(0)
    try:
        # The parser alone: placeholders such as JOB are no values.
        _, left, _ = command.make_parser(command.context_class(command)).parse_args(words)
    except Exception as error:  # a usage error, of the click that typer brings or of another
        # A page may name an option without its value.
        return "" if "requires an argument" in str(error) else str(error)
    return f"{command.name} does not take {left}" if left else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_programs_accept_every_call_on_a_page(page: Path) -> None:
    assert [why for call in calls(page.read_text()) if (why := fault(call))] == []


def test_the_pages_hold_calls() -> None:
    assert len({call for page in PAGES for call in calls(page.read_text())}) > 25


def test_every_make_target_on_a_page_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    assert len(re.findall(r"^[a-z-]+%?:.*## ", makefile, re.MULTILINE)) <= 30
    targets |= {f"bench-{name}" for name in re.findall(r"^bench_([a-z-]+) =", makefile, re.MULTILINE)}
    pages = [*PAGES, *ROOT.glob("tests/benchmarks/*.md")]
    text = "\n".join(page.read_text() for page in pages)
    named = set(re.findall(r"(?:`|^ *)make ([a-z][a-z-]*)", text, re.MULTILINE))
    assert len(named) > 30
    assert named <= targets


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("polluxctl settings set --account-weight vision=2", ""),
        ("polluxctl explain 1234", ""),
        ("polluxctl explain 1 2", "explain does not take ['2']"),
        ("polluxctl fairness get", "polluxctl has no command fairness"),
        ("polluxctl jobs --everybody", "No such option: --everybody"),
        ("polluxctl settings put", "polluxctl has no command put"),
    ],
)
def test_a_wrong_call_is_found(call: str, why: str) -> None:
    assert fault(call) == why


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_a_command_is_a_call_of_it(name: str) -> None:
    example = COMMANDS[name].example
    assert (example.split()[0], fault(f"polluxctl {example}")) == (name, "")


def test_the_page_of_directives_lists_every_directive_of_the_hook() -> None:
    (keys,) = re.findall(r"local KEYS = \{(.*?)\}", (ROOT / "slurm_hooks/directives.lua").read_text())
    page = (ROOT / "docs/user-guide/directives.md").read_text()
    table = page.partition("## Directives\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)
    assert listed == re.findall(r'"([a-z-]+)"', keys)
