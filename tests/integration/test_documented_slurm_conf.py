"""Every line of slurm.conf that a page or a message tells to write is one that Slurm reads."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[2]
_SETTING = re.compile(r"(?<![\w$.{-])([A-Z][A-Za-z]+)=([\w/:.-]+)?")
NOT_OF_SLURM_CONF = {
    "polluxd.service, systemd's": {"User", "Group", "ListenStream"},
    "scontrol update": {"JobId", "NumNodes", "ReqNodeList", "StartTime", "TresPerNode", "NodeList"},
    "what scontrol and sshare print": {"UserId", "Fairshare", "Comment"},
    "gres.conf": {"File"},
    "a driver's lines in oci.conf": {"RunTimeRun", "RunTimeQuery", "RunTimeKill", "RunTimeDelete"},
}
"""Keys of other files and commands that pages name, by whose they are."""
BASE = """\
ClusterName=x
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=1
GresTypes=gpu
"""


def settings() -> Iterator[tuple[str, str, str]]:
    """Yield where it stands, key and value."""
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]
    pages += [*(ROOT / "slurm_hooks").glob("*.md"), *(ROOT / "polluxd" / "site").glob("*.py")]
    elsewhere = set[str]().union(*NOT_OF_SLURM_CONF.values())
    for page in pages:
        for key, value in _SETTING.findall(page.read_text()):
            if key not in elsewhere and not key.isupper():
                yield str(page.relative_to(ROOT)), key, value


def complaints(folder: Path, *lines: str) -> str:
    """Return what Slurm says of slurm.conf with these lines, beyond that no slurmctld answers."""
    conf = folder / "slurm.conf"
    written = "\n".join(lines)
    kinds = {line.partition("=")[0] for line in lines}
    base = BASE if "GresTypes" not in kinds else BASE.replace("GresTypes=gpu\n", "")
    conf.write_text(f"{base}{written}\n")
    done = subprocess.run(
        ["scontrol", "ping"],
        env={"SLURM_CONF": str(conf), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    return "" if "Slurmctld(primary)" in said and "error" not in said.lower() else said


def as_lines(key: str, value: str) -> list[str]:
    """Return the places in slurm.conf where a key may stand."""
    value = re.sub(r"\bN\b", "4", value) or "/x"
    if key in ("NodeName", "PartitionName"):
        return [f"{key}={value or 'n1'}"]
    if key == "PreemptType":  # Slurm reads it beside its mode alone
        return [f"{key}={value}\nPreemptMode=REQUEUE"]
    return [
        f"{key}={value}",
        f"NodeName=n1 CPUs=4 {key}={value}",
        f"NodeName=n1 CPUs=4\nPartitionName=p Nodes=n1 {key}={value}",
    ]


def test_the_parser_refuses_what_is_no_key(tmp_path: Path) -> None:
    assert complaints(tmp_path) == ""
    assert "unrecognized key: JobDefaults" in complaints(tmp_path, "JobDefaults=DefCpuPerGPU=4")


def test_every_line_of_the_pages_is_read(tmp_path: Path) -> None:
    found: dict[tuple[str, str], set[str]] = {}
    for page, key, value in settings():
        found.setdefault((key, value), set()).add(page)
    assert {("DefCpuPerGPU", "N"), ("JobSubmitPlugins", "lua")} <= found.keys()
    refused = {}
    for (key, value), pages in found.items():
        tries = [complaints(tmp_path, line) for line in as_lines(key, value)]
        if all(tries):
            refused[f"{key}={value}"] = (sorted(pages), tries[0][:200])
    assert refused == {}
