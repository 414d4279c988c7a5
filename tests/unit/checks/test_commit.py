"""Pages of measurements name their commit."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from contrib.commit import commit


def test_a_commit_with_changes_has_a_plus_and_pages_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit(tmp_path) == "unknown"
    for name in ("code.py", "page.md"):
        (tmp_path / name).write_text("before")
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "First"]):
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True)
    (tmp_path / "page.md").write_text("after")
    clean = commit(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{7,}", clean)
    (tmp_path / "code.py").write_text("after")
    assert commit(tmp_path) == f"{clean}+"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(tmp_path) == "unknown", "without git"
