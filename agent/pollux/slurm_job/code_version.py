"""Which code this process runs: ranks that train together must run the same, for they meet in collectives step by step.

A joiner starts long after the others. An agent that was installed anew meanwhile, or a script that was edited, would
have it exchange other things at other times, and all of them end in that.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path


def _digest(paths: Iterable[Path]) -> str:
    """16 hexadecimal digits of the files' names and contents; files that cannot be read count as empty."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError:
            content = b""
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


# At import, with the launcher's: a process that it forks much later runs what was read then.
_AGENT = _digest(sorted(Path(__file__).parents[1].rglob("*.py")))


def code_version() -> dict[str, str]:
    """Digests of the agent's code as it was loaded, and of the script as it is now: call it where that begins."""
    return {"the agent": _AGENT, "the script": _digest([Path(sys.argv[0])])}
