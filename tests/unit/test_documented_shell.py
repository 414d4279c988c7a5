"""A test runs every shell command of the pages, or make knows it.

`tests/unit/cli/test_documented_commands.py` holds the calls of polluxctl and polluxd.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from contrib.packaging.page_commands import PAGE, commands

ROOT = Path(__file__).parents[2]
PATTERNS = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**/*.md",
    "slurm_hooks/*.md",
    "contrib/**/*.md",
)
PAGES = sorted(
    page
    for pattern in PATTERNS
    for page in ROOT.glob(pattern)
    # A build writes the pages of the programs.
    if "_build" not in page.parts and page.name not in ("polluxctl.md", "polluxd.md")
)
BLOCK = re.compile(r"^( *)```(?P<language>[^\n]*)\n(?P<body>.*?)^ *```", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(
    r"(?:make|systemctl|apt-get|sed|sacctmgr|sacct|sbatch|scontrol|python3|pip|install|ln|useradd|cp|echo|"
    r"ansible-playbook|\S+/bin/\S+|pollux run) "
)
RUN = [
    *commands(PAGE.read_text()),
    *commands(PAGE.with_name("upgrade.md").read_text(), "Upgrade"),
    *commands(PAGE.read_text(), "Without packages"),
    *commands(PAGE.read_text(), "Removal"),
]
"""What `make install-test`, `make upgrade-test` and `contrib/packaging/build_python.sh` take from the pages and run."""

HELD = {
    "systemctl reload polluxd": ("docs/administrator-guide/install.md", "systemctl reload polluxd"),
    "systemctl enable --now polluxd-answers": (
        "docs/administrator-guide/install.md",
        "systemctl enable --now polluxd polluxd-answers",
    ),
    "sacct -aXP --starttime 2026-10-01 --format JobID,Submit,Elapsed,AllocTRES > october.txt": (
        "polluxd/sim/recorded.py",
        '("JobID", "Submit", "Elapsed", "AllocTRES")',
    ),
    "sacct --duplicates --noconvert -nPX -j 1234 -o JobID,State,Start,ElapsedRaw,AllocTRES": (
        "contrib/packaging/upgrade_test.sh",
        'sacct --duplicates --noconvert -nPX -j "$job" -o JobID,State,Start,ElapsedRaw,AllocTRES',
    ),
    "ansible-playbook -i inventory.ini contrib/ansible/site.yml": (
        "contrib/packaging/ansible_test.sh",
        "/opt/playbook/site.yml",
    ),
    "sacct --duplicates --noconvert -nPX --uid 1000 -S 2026-11-20 -o "
    "JobID,State,Start,ElapsedRaw,AllocTRES,AdminComment | grep companion-of=1234": (
        "tests/integration/test_usage.py",
        "-o JobID,State,Start,ElapsedRaw,AllocTRES,AdminComment | grep companion-of={job_id}",
    ),
    "pollux run train.py": ("tests/integration/test_launcher.py", "pollux run train.py"),
    "pollux run train.py --epochs 90": ("tests/integration/test_launcher.py", "pollux run train.py"),
    'pollux run --container "apptainer exec --nv $HOME/image.sif" train.py': (
        "tests/integration/loop/elastic.py",
        '["pollux run", f"--container {container}"]',
    ),
    "make -C slurm_hooks/spank install PLUGIN_DIR=/usr/lib/slurm": (
        "tests/integration/test_spank.py",
        '"install"',
    ),
    'echo "optional /usr/lib/slurm/spank_pollux.so" >>/etc/slurm/plugstack.conf': (
        "tests/integration/test_spank.py",
        "plugstack.conf",
    ),
}
"""A command with a site's own words: the file with the form that is tested, and that form."""


def shell_lines(text: str) -> list[str]:
    """Return the lines that call a program.

    They stand in `console` and `bash` blocks, or are indented.
    """
    blocks = [
        line.strip()
        for m in BLOCK.finditer(text)
        if m["language"].strip() in ("console", "bash", "")
        for line in m["body"].splitlines()
    ]
    indented = [line.strip() for line in BLOCK.sub("", text).splitlines() if line.startswith("    ")]
    return [line for line in blocks + indented if PROGRAM.match(line)]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def unheld(line: str) -> bool:
    """Tell whether no test stands behind a command."""
    if line in RUN:
        return False
    if line in HELD:
        file, form = HELD[line]
        return form not in (ROOT / file).read_text()
    made = re.match(r"make ([a-z][a-z-]*)", line)
    return made is None or made[1] not in targets()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_test_stands_behind_every_command_of_a_page(page: Path) -> None:
    text = page.read_text()
    assert [line for line in shell_lines(text) if unheld(line)] == []
    named = re.findall(r"`make ([a-z][a-z-]*)", text)
    assert [target for target in named if target not in targets()] == []


def test_a_command_that_nothing_runs_is_found() -> None:
    text = "```console\nsystemctl mask polluxd\nmake demo\nmake coffee\n```\n"
    assert [line for line in shell_lines(text) if unheld(line)] == ["systemctl mask polluxd", "make coffee"]
    assert len([line for page in PAGES for line in shell_lines(page.read_text())]) > 30
