"""Print the unit tests of the rooms that a change touches.

    python contrib/checks/changed.py [--since main]

`make check` runs these tests. A change is what differs from the branch `main`, committed or not. Each source file
stands for the test folder of its room, a test module for itself, and a module that tests share for the tests that
import it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
# Rooms whose tests are not in the test folder of their own name.
ELSEWHERE = {
    "sql": "store",
    "slurm_hooks": "slurm",
    "contrib/man": "cli",
    "contrib/demo": "demo",
    "contrib/chaos": "chaos",
    "contrib/checks": "checks",
    "agent/pollux/goodput.py": "goodput",
    "agent/pollux/parameters.py": "goodput",
    "agent/pollux/fit.py": "goodput",
}


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
    found = []
    if path.parts[:2] == ("tests", "unit") and path.name.startswith("test_"):
        found = [name]
    elif path.parts[:2] == ("tests", "unit") or path.parent.name == "tests":
        found = _users(path)
    elif rooms := [room for prefix, room in ELSEWHERE.items() if path.is_relative_to(prefix)]:
        found = [f"tests/unit/{rooms[0]}"]
    elif path.parts[0] == "polluxd":
        found = [f"tests/unit/{path.parts[1]}" if len(path.parts) > 2 else f"tests/unit/test_{path.name}"]
    elif path.parts[:2] == ("agent", "pollux") and len(path.parts) > 3:
        found = [f"tests/unit/agent/{path.parts[2]}"]
    return [test for test in found if (ROOT / test).exists()]


def _users(path: PurePosixPath) -> list[str]:
    """Return the tests that import a shared module; a conftest's folder."""
    if path.name == "conftest.py":
        return [str(path.parent)]
    imported = re.compile(rf"(from|import) [\w.]*\b{path.stem}\b")
    folder = "tests/unit" if path.parent.name == "tests" else path.parent
    tests = (ROOT / folder).rglob("test_*.py")
    return [str(test.relative_to(ROOT)) for test in tests if imported.search(test.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the unit tests of the rooms that a change touches.")
    parser.add_argument("--since", default="main", help="the branch or commit to compare with (main)")
    arguments = parser.parse_args()

    wanted = {test for name in changed(arguments.since) for test in covering(name)}
    inside = {name for name in wanted if any(name.startswith(f"{other}/") for other in wanted)}
    print("\n".join(sorted(wanted - inside)))


if __name__ == "__main__":
    main()
