"""The man pages name every command and option of `--help`, no other."""

from __future__ import annotations

import importlib
import io
import re
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import pytest

MAN = Path(__file__).parents[3] / "contrib" / "man"
PAGES = {
    "polluxctl.1": ("polluxd.cli.ctl", "polluxctl"),
    "polluxd.8": ("polluxd.cli.daemon", "polluxd"),
    "pollux.1": ("pollux.launcher.launch", "pollux"),
}
_OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]+|-[a-zA-Z])\b")
_FOREIGN = {"--ntasks-per-node"}  # srun's, named in prose


@cache
def help_of(module: str, name: str, *words: str) -> str:
    """What `name words --help` prints, plainly."""
    if module == "pollux.launcher.launch":  # blocks a signal as it is imported: not in this process
        done = subprocess.run(
            [sys.executable, "-m", module, *words, "--help"],
            capture_output=True,
            text=True,
            check=True,
            env={"PATH": "", "COLUMNS": "200"},
        )
        return done.stdout
    out = io.StringIO()
    main = importlib.import_module(module).main
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        for variable, value in (("COLUMNS", "200"), ("NO_COLOR", "1"), ("TERM", "dumb")):
            patch.setenv(variable, value)
        patch.setattr("sys.argv", [name, *words, "--help"])
        with pytest.raises(SystemExit) as end:
            main()
    assert not end.value.code
    return out.getvalue()


def commands_in(text: str) -> list[str]:
    """Names listed in the sections of commands of a help text, boxed by rich or not."""
    found, inside = [], False
    for line in text.splitlines():
        bare = line.strip(" │╭╰─╮╯")
        if re.match(r"(Commands:?|positional arguments:|My jobs:|Cluster:|Administration:|Analysis:)$", bare):
            inside = True
        elif inside and (match := re.match(r"[\s│]{2,6}([a-z]+(?:-[a-z]+)*)\s{2,}\S", line)):
            found.append(match[1])
        elif inside and not bare:
            inside = False
    return found


def options_of(name: str, module: str) -> tuple[set[str], set[str]]:
    """All options of the program and its commands, and all commands as typed."""
    text = help_of(module, name)
    options, commands = set(_OPTION.findall("\n".join(_listed(text)))), set()
    for command in commands_in(text):
        inner = help_of(module, name, command)
        nested = commands_in(inner)
        commands |= {f"{command} {word}" for word in nested} or {command}
        texts = [inner, *(help_of(module, name, command, word) for word in nested)]
        for each in texts:
            # Of a usage text only the option lists count: prose and examples name others' options.
            options |= set(_OPTION.findall("\n".join(_listed(each))))
    return options, commands


def _listed(text: str) -> list[str]:
    return [
        re.split(r"\s{2,}(?=[A-Za-z])", line.strip(" │"))[0]
        for line in text.splitlines()
        if re.match(r"[\s│]*\*?\s*-", line)
    ]


def page(name: str) -> str:
    return (
        (MAN / name)
        .read_text()
        .replace("\\-", "-")
        .replace("\\fR", "")
        .replace("\\fI", "")
        .replace("\\fP", "")
    )


@pytest.mark.parametrize("name", PAGES)
def test_the_page_names_every_option_and_no_other(name):
    module, program = PAGES[name]
    options, _ = options_of(program, module)
    documented = set(_OPTION.findall(re.sub(r'^\.[A-Z]+|"', "", page(name), flags=re.MULTILINE)))
    documented -= {o for o in documented if re.fullmatch(r"-\d", o)}
    assert options - documented == set(), "in --help, not in the page"
    assert documented - options - _FOREIGN == set(), "in the page, not in --help"


@pytest.mark.parametrize("name", ["polluxctl.1", "polluxd.8"])
def test_the_page_has_a_section_for_every_command(name):
    module, program = PAGES[name]
    _, commands = options_of(program, module)
    sections = {
        re.sub(r"\s*\[?[A-Z]+\]?$", "", s) for s in re.findall(r"^\.SS (.+)$", page(name), re.MULTILINE)
    }
    assert sections == commands


@pytest.mark.parametrize("name", PAGES)
def test_the_page_starts_as_man_pages_do(name):
    text = page(name)
    section = name.rpartition(".")[2]
    assert text.startswith(f".TH {PAGES[name][1].upper()} {section} ")
    assert ".SH NAME\n" in text


def test_directives_in_the_page_are_those_of_the_hook():
    hook = (MAN.parents[1] / "slurm_hooks" / "directives.lua").read_text()
    keys = re.search(r"local KEYS = \{(.+?)\}", hook, re.DOTALL)
    assert keys is not None
    documented = set(re.findall(r"^\.BR ([a-z]+(?:-[a-z]+)?) =", page("pollux.1"), re.MULTILINE))
    assert documented == set(re.findall(r'"([a-z-]+)"', keys[1]))
