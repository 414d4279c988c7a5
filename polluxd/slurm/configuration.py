"""Slurm's configuration as it is in force, and Slurm's commands as those ask them who need few."""

from __future__ import annotations

import re
from pathlib import Path

from polluxd.errors import SlurmGarbled

from .commands import Commands


class Slurm(Commands):
    """Slurm's commands, as command-line tools ask them."""

    def settings(self) -> dict[str, str]:
        """Return slurm.conf as slurmctld has it in force. Raises SlurmError.

        From 24.05 on, Slurm numbers scripts (`Prolog[0]`): they become one value, with commas between them.
        """
        text = self.ask("scontrol", "show", "config")
        found: dict[str, str] = {}
        for key, number, value in re.findall(r"^([A-Za-z_]\w*)(\[\d+\])?\s+= (.*?)\s*$", text, re.MULTILINE):
            found[key] = f"{found[key]},{value}" if number and key in found else value
        at = re.match(r"Configuration data as of (\S+)", text)
        if at is None or "ClusterName" not in found:
            raise SlurmGarbled(
                f"expected Slurm's configuration from `scontrol show config`, got {text[:80]!r}"
            )
        found["at"] = at[1]
        return {key: "" if value == "(null)" else value for key, value in found.items()}


def settings_of(conf: Path) -> dict[str, str]:
    """Return what a slurm.conf says; for when slurmctld does not answer."""
    try:
        text = conf.read_text(errors="replace")
    except OSError:
        return {}
    return dict(re.findall(r"^\s*(\w+)\s*=\s*(\S+)", text, re.MULTILINE))
