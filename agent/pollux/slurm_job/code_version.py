"""The version of the code that this process runs.

Ranks that train together must run the same code, because they meet in collectives step by step.

A joiner starts long after the others. With an agent that was updated, or a script that was edited, it would exchange
other values at other times, which ends all ranks.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

from pollux.private_folder import read_named


def _digest(paths: Iterable[Path]) -> str:
    """16 hexadecimal digits of the files' names and contents. Files that cannot be read count as empty."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            content = read_named(path)
        except OSError:
            content = b""
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


# Computed at import, in the launcher: a process that it forks later runs the code that was read then.
_AGENT = _digest(sorted(Path(__file__).parents[1].rglob("*.py")))


def code_version() -> dict[str, str]:
    """Digests of the agent's code and of the script.

    The agent's is of its code as it was loaded, the script's as it is now: call this where the script begins.
    """
    return {"the agent": _AGENT, "the script": _digest([Path(sys.argv[0])])}
