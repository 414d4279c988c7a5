"""`pollux` of the package pollux-node: which Python starts the launcher."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "contrib" / "packaging" / "pollux"
SITE = "/usr/lib/pollux/bin/python3"


def call(folder: Path, *words: str, agent: bool, container: str = "") -> subprocess.CompletedProcess[str]:
    """Run the script beside stand-ins for both interpreters."""
    script, own, site = folder / "pollux", folder / "python3", folder / "site"
    script.write_text(SCRIPT.read_text().replace(SITE, str(site)))
    own.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit {int(not agent)}\necho own "$@"\n')
    site.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\necho site "$@"\n')
    for path in (script, own, site):
        path.chmod(0o755)
    env = {"PATH": f"{folder}:/usr/bin:/bin", "POLLUX_CONTAINER": container}
    return subprocess.run([script, *words], env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("container", ["", "apptainer exec a.sif"])
def test_the_python_of_the_job_is_used_where_it_has_the_agent(tmp_path: Path, container: str) -> None:
    done = call(tmp_path, "run", "t.py", agent=True, container=container)
    assert done.stdout == "own -m pollux.launcher.launch run t.py\n"


def test_with_a_container_the_python_of_the_site_will_do(tmp_path: Path) -> None:
    done = call(tmp_path, "run", "--container", "c", "t.py", agent=False)
    assert done.stdout == "site -m pollux.launcher.launch run --container c t.py\n"
    assert call(tmp_path, "run", "t.py", agent=False, container="c").stdout.startswith("site ")


def test_without_an_agent_the_message_says_how_to_install_it(tmp_path: Path) -> None:
    done = call(tmp_path, "run", "t.py", agent=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install '/usr/share/pollux/pollux_agent-VERSION-py3-none-any.whl[torch]'" in done.stderr
