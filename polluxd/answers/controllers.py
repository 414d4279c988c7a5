"""Find polluxd's answers: on slurmctld's machines, or by POLLUX_SERVER."""

from __future__ import annotations

import os
import re
from pathlib import Path

from polluxd.errors import ConfigError, SlurmGarbled
from polluxd.settings import AnswersSettings

from .client import AnswersClient
from .munge import Munge

SERVER = "POLLUX_SERVER"
"""Names the host, and the port, of `polluxd answer`."""


def answers_client(slurm_settings: str) -> AnswersClient:
    """Return a client of the answers.

    Args:
        slurm_settings: what `scontrol show config` prints.

    Raises:
        ConfigError: POLLUX_SERVER is no address.
        SlurmGarbled: the settings name no controller.
    """
    user = re.search(r"^SlurmUser\s+= \S+?\((\d+)\)", slurm_settings, re.MULTILINE)
    port = AnswersSettings().listen.rpartition(":")[2]
    named = os.environ.get(SERVER, "")
    if named:
        servers = [_address(named, port)]
    else:
        hosts = re.findall(
            r"^SlurmctldHost\[\d+\]\s+= (\S+?)(?:\((\S+)\))?\s*$", slurm_settings, re.MULTILINE
        )
        servers = [(address or host, int(port)) for host, address in hosts]
    if user is None or not servers:
        raise SlurmGarbled(
            f"expected SlurmUser and SlurmctldHost from `scontrol show config`, got {slurm_settings[:80]!r}"
        )
    return AnswersClient(servers, Munge(munge_socket(slurm_settings)), frozenset({int(user[1])}))


def munge_socket(slurm_settings: str) -> Path | None:
    """Return the socket that AuthInfo of slurm.conf names; None: munge's own."""
    named = re.search(r"^AuthInfo\s+= .*?socket=([^,\s]+)", slurm_settings, re.MULTILINE)
    return Path(named[1]) if named else None


def _address(named: str, port: str) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+)(?::(\d{1,5}))?", named)
    if found is None or not 0 < int(found[2] or port) < 65536:
        raise ConfigError(f"{SERVER}: expected HOST or HOST:PORT, got {named!r}")
    return found[1].strip("[]"), int(found[2] or port)
