"""Name the commit that a page of measurements is of."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def commit(root: Path = ROOT) -> str:
    """Return the short hash; "+" stands for changes since, pages aside. Outside of a repository: "unknown"."""

    def git(*words: str) -> str:
        asked = ["git", "-C", str(root), *words]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!*.md")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        bundled = root / "commit"  # of contrib/gpu/bundle.sh
        return bundled.read_text().strip() if bundled.exists() else "unknown"


COMMIT = commit()
"""Of the code that this process began with."""
