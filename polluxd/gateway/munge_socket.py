"""The munged that Slurm uses."""

from __future__ import annotations

import re
from pathlib import Path


def munge_socket(slurm_settings: str) -> Path | None:
    """Return the socket that AuthInfo of slurm.conf names; None: munge's own.

    Args:
        slurm_settings: what `scontrol show config` prints.
    """
    named = re.search(r"^AuthInfo\s+= .*?socket=([^,\s]+)", slurm_settings, re.MULTILINE)
    return Path(named[1]) if named else None
