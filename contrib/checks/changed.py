"""Print the tests of what a change touches.

    python contrib/checks/changed.py [--since main]

`make check` runs these tests. A change is what differs from the branch `main`, committed or not. Each source file
stands for the test folder of its room, a test module for itself, and a module that tests share for the tests that
import it. A file for which nobody knows a test is an error: it would pass where nobody has looked.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = "tests/unit/checks/test_programs.py"
"""Imports every program of contrib and of the benchmarks."""
# The longest prefix of a path counts. A room that is not here has the test folder of its own name.
ELSEWHERE = {
    "sql": ["tests/unit/store"],
    "slurm_hooks": ["tests/unit/slurm"],
    "polluxd/sim": ["tests/sim"],
    "polluxd/errors.py": ["tests/unit/test_printable.py", "tests/unit/cli/test_polluxctl.py"],
    "polluxd/__init__.py": ["tests/unit/test_capabilities.py"],
    "polluxd/HOW_IT_RUNS.md": ["tests/unit/test_documents.py"],
    "agent/pollux/goodput.py": ["tests/unit/goodput"],
    "agent/pollux/parameters.py": ["tests/unit/goodput"],
    "agent/pollux/fit.py": ["tests/unit/goodput"],
    "agent/pollux/errors.py": ["tests/unit/agent/loop/test_bad_input.py"],
    "agent/pollux/private_folder.py": ["tests/unit/agent/test_private_folder.py"],
    "agent/pollux/__init__.py": ["tests/unit/test_distributions.py"],
    "agent/pollux/version.py": ["tests/unit/test_distributions.py"],
    "agent/pollux/integrations": ["tests/integration/integrations"],
    "agent": ["tests/unit/test_distributions.py"],
    "contrib": [PROGRAMS],
    "contrib/man": ["tests/unit/cli/test_man.py"],
    "contrib/demo": ["tests/unit/demo", PROGRAMS],
    "contrib/chaos": ["tests/unit/chaos", PROGRAMS],
    "contrib/sites": ["tests/unit/sites", PROGRAMS],
    "contrib/grafana": ["tests/unit/metrics"],
    "contrib/checks": ["tests/unit/checks"],
    "contrib/commit.py": ["tests/unit/checks/test_commit.py"],
    "tests/benchmarks": [PROGRAMS],
    "tests/browser": ["tests/browser"],
    "tests/metrics": ["tests/metrics"],
    "docs": ["tests/unit/cli/test_documented_commands.py"],
    "Makefile": ["tests/unit/cli/test_documented_commands.py"],
    "pyproject.toml": ["tests/unit/test_distributions.py"],
    "constraints.txt": ["tests/unit/test_distributions.py"],
}
SILENT = re.compile(r"(.*\.(png|svg|gitignore)|LICENSE|.*/py\.typed|\.ci/.*|.*/SHA256SUMS|\.[\w.-]+)")
"""What no test reads."""


def changed(since: str) -> list[str]:
    """Return the files that differ from `since`, committed or not."""

    def git(*arguments: str) -> list[str]:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()

    base = git("merge-base", "HEAD", since)[0]
    return sorted({*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")})


def covering(name: str) -> list[str]:
    """Return the existing test files and folders for one changed file."""
    path = PurePosixPath(name)
    if path.parts[0] == "tests" and path.name.startswith("test_"):
        found = [name]
    elif path.parts[0] == "tests" and path.suffix == ".py" and "benchmarks" not in path.parts:
        found = _users(path)
    elif known := [prefix for prefix in ELSEWHERE if path.is_relative_to(prefix)]:
        found = ELSEWHERE[max(known, key=len)]
        room = f"tests/unit/agent/{path.parts[2]}" if path.parts[:2] == ("agent", "pollux") else ""
        if known == ["agent"] and (ROOT / room).is_dir():
            found = [room]
    elif path.parts[0] == "polluxd":
        found = [f"tests/unit/{path.parts[1]}" if len(path.parts) > 2 else f"tests/unit/test_{path.name}"]
    elif path.suffix == ".md":
        found = ELSEWHERE["docs"]
    else:
        found = []
    return [test for test in found if (ROOT / test).exists()]


def _users(path: PurePosixPath) -> list[str]:
    """Return the tests that import a shared module, or the folder of a conftest or of a script of tests."""
    if path.name == "conftest.py":
        return [str(path.parent)]
    imported = re.compile(rf"\b{path.stem}\b")
    folder = "tests/unit" if path.parent.name == "tests" else path.parent
    tests = (ROOT / folder).rglob("test_*.py")
    found = [str(test.relative_to(ROOT)) for test in tests if imported.search(test.read_text())]
    return found or [str(path.parent)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the tests of what a change touches.")
    parser.add_argument("--since", default="main", help="the branch or commit to compare with (main)")
    arguments = parser.parse_args()

    files = [name for name in changed(arguments.since) if (ROOT / name).exists()]
    found = {name: covering(name) for name in files if not SILENT.fullmatch(name)}
    if silent := [name for name, tests in found.items() if not tests]:
        sys.exit(f"no test is known for {', '.join(silent)}: name one in contrib/checks/changed.py")
    wanted = {test for tests in found.values() for test in tests}
    inside = {name for name in wanted if any(name.startswith(f"{other}/") for other in wanted)}
    print("\n".join(sorted(wanted - inside)))


if __name__ == "__main__":
    main()
