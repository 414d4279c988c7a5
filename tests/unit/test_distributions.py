"""The two Python distributions: each brings its own package and commands, and polluxd asks for its own agent."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pollux.version import __version__

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    """Both wheels, built from copies: a build leaves nothing in the tree."""
    out = tmp_path_factory.mktemp("wheels")
    source = tmp_path_factory.mktemp("source") / "tree"
    shutil.copytree(
        ROOT,
        source,
        ignore=lambda folder, names: {n for n in names if n[0] == "." or n in ("tests", "docs", "dist")},
    )
    for folder in (source / "agent", source):
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return {path.name.split("-")[0]: zipfile.ZipFile(path) for path in out.glob("*.whl")}


def read(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = [path for path in wheel.namelist() if path.endswith(f".dist-info/{name}")]
    return wheel.read(path).decode()


@pytest.mark.parametrize(
    ("distribution", "package", "commands"),
    [("pollux_agent", "pollux", ["pollux"]), ("polluxd", "polluxd", ["polluxctl", "polluxd"])],
)
def test_a_wheel_has_one_package_and_its_commands(
    wheels: dict[str, zipfile.ZipFile], distribution: str, package: str, commands: list[str]
) -> None:
    wheel = wheels[distribution]
    assert {path.split("/")[0] for path in wheel.namelist() if ".dist-info/" not in path} == {package}
    entries = ConfigParser()
    entries.read_string(read(wheel, "entry_points.txt"))
    assert sorted(entries["console_scripts"]) == commands


def test_polluxd_asks_for_the_agent_of_its_own_version_and_for_no_torch(
    wheels: dict[str, zipfile.ZipFile],
) -> None:
    needed = {}
    for name, wheel in wheels.items():
        lines = Parser().parsestr(read(wheel, "METADATA")).get_all("Requires-Dist") or []
        needed[name] = {r.name: r for r in map(Requirement, lines) if not r.marker}
    assert str(needed["polluxd"]["pollux-agent"].specifier) == f"=={__version__}"
    assert set(needed["pollux_agent"]) == {"numpy"}
    assert "torch" not in needed["polluxd"]
