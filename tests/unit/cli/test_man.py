"""The manual pages are those of the programs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from contrib.man import generate
from polluxd.config.settings import SECTIONS
from polluxd.config.settings_reference import in_file

MAN = Path(generate.__file__).parent
_OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]+|-[a-zA-Z])\b")
_FOREIGN = {"--ntasks-per-node"}  # srun's, named in prose


def page(name: str) -> str:
    text = generate.page(name) if name in generate.PAGES else (MAN / name).read_text()
    return re.sub(r"\\f[RIPB]", "", text.replace("\\-", "-"))


def test_a_package_gets_each_page_and_an_example_with_every_setting(tmp_path):
    generate.write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "polluxctl.1",
        "polluxd.8",
        "polluxd.toml.5",
        "polluxd.toml",
    }
    keys = {info.key for section in SECTIONS for info in in_file(section)}
    described = (tmp_path / "polluxd.toml.5").read_text().replace("\\-", "-")
    assert keys <= {*re.findall(r"^\.B ([a-z_]+)$", described, re.M)}
    assert "\n.SH OPTIONS\n" in (tmp_path / "polluxd.8").read_text().partition("\n.SS run\n")[2]


def test_a_page_has_each_command_with_its_options():
    text = page("polluxctl.1")
    assert len(re.findall(r"^\.SS ", text, re.MULTILINE)) > 35
    assert ".SS settings set\n" in text
    assert ".TP\n--account-weight NAME=WEIGHT\nWeight of an account's jobs" in text
    assert (
        ".SS settings preview\nShow what a change would bring each job. Nothing is changed.\nOptions as for\n"
        in text
    )


def test_the_launchers_page_names_every_option_and_no_other():
    def help_of(*words: str) -> str:  # the module blocks a signal as it is imported: not in this process
        command = [sys.executable, "-m", "pollux.launcher.launch", *words, "--help"]
        env = {"PATH": "", "COLUMNS": "200"}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout

    whole = help_of()
    texts = [whole, *(help_of(word) for word in re.findall(r"^ {4}([a-z]+) ", whole, re.MULTILINE))]
    # Of a usage text only the option lists count: prose and examples name others' options.
    lists = [
        re.split(r"\s{2,}", line.strip())[0]
        for text in texts
        for line in text.splitlines()
        if re.match(r"\s*-", line)
    ]
    options = set(_OPTION.findall("\n".join(lists)))
    documented = set(_OPTION.findall(re.sub(r'^\.[A-Z]+|"', "", page("pollux.1"), flags=re.MULTILINE)))
    assert len(texts) > 2
    assert options - documented == set(), "in --help, not in the page"
    assert documented - options - _FOREIGN == set(), "in the page, not in --help"


@pytest.mark.parametrize("name", ["polluxctl.1", "polluxd.8", "pollux.1"])
def test_the_page_starts_as_man_pages_do(name):
    program, _, section = name.rpartition(".")
    text = page(name)
    assert text.startswith(f".TH {program.upper()} {section} ")
    assert ".SH NAME\n" in text


def test_directives_in_the_page_are_those_of_the_hook():
    hook = (MAN.parents[1] / "slurm_hooks" / "directives.lua").read_text()
    keys = re.search(r"local KEYS = \{(.+?)\}", hook, re.DOTALL)
    assert keys is not None
    documented = set(re.findall(r"^\.BR ([a-z]+(?:-[a-z]+)?) =", page("pollux.1"), re.MULTILINE))
    assert documented == set(re.findall(r'"([a-z-]+)"', keys[1]))
