"""Run Slurm's commands, with a bound of time, on one cluster."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from polluxd.errors import SlurmError, SlurmRefused, SlurmUnavailable

# What the client commands print when slurmctld did not answer, as opposed to when it said no. Some come from
# Slurm's communication layer, some from munge.
_NO_ANSWER = re.compile(
    r"unable to contact slurm controller|connection refused|connect failure|socket timed out|communication|"
    r"zero bytes were transmitted|transport endpoint|timed out|in standby mode|authentication error|munge|"
    r"(unable to|could not) establish a configuration source|unable to process configuration file|temporarily|"
    r"slurmctld is shutting down|resource temporarily unavailable|connection reset|"
    r"slurm_(msg_sendto|receive_msg|send_recv)|missing socket",
    re.IGNORECASE,
)


class Commands:
    """Slurm's commands.

    Args:
        conf: slurm.conf of the cluster; None: the machine's own (or configless).
        timeout: seconds after which a command is given up.
    """

    def __init__(self, conf: Path | str | None = None, *, timeout: float = 10.0) -> None:
        self.timeout = timeout
        # Nothing of another cluster or job may leak in, and times are to be UTC both ways, whatever the machine's
        # zone and its daylight saving.
        dropped = ("SLURM_", "SBATCH_", "SCANCEL_", "SQUEUE_", "SINFO_")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        self.environment |= {"TZ": "UTC0", "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
        if conf is not None or "SLURM_CONF" in os.environ:
            self.environment["SLURM_CONF"] = str(conf if conf is not None else os.environ["SLURM_CONF"])

    def ask(self, *argv: str, environment: Mapping[str, str] = MappingProxyType({}), given: str = "") -> str:
        """Return what a command prints. Raises SlurmUnavailable, SlurmRefused."""
        return self.run(*argv, environment=environment, given=given).stdout

    def run(
        self,
        *argv: str,
        environment: Mapping[str, str] = MappingProxyType({}),
        given: str = "",
        user: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, as `user` where root asks for that. Raises SlurmUnavailable, SlurmRefused."""
        who: dict[str, Any] = {}
        if user and os.geteuid() == 0:
            account = pwd.getpwnam(user)
            who = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": [], "cwd": "/"}
        try:
            done = subprocess.run(
                argv,
                env={**self.environment, **environment},
                input=given,
                capture_output=True,
                timeout=self.timeout,
                check=False,
                # Undecodable bytes (a job's name in another encoding) must not stop the reading.
                encoding="utf-8",
                errors="replace",
                **who,
            )
        except subprocess.TimeoutExpired as error:
            raise SlurmUnavailable(
                f"{_short(argv)}: no answer within {self.timeout:g} s; it may have been applied all the same"
            ) from error
        except OSError as error:
            raise SlurmUnavailable(
                f"{argv[0]} cannot be run ({error.strerror}): is Slurm's client installed?"
            ) from error
        if done.returncode == 0:
            return done
        raise failure(argv, done.returncode, (done.stderr or done.stdout).strip())


def failure(argv: Sequence[str], status: int, complaint: str) -> SlurmError:
    """The error of a request that failed: no answer, or a no."""
    if status < 0 or _NO_ANSWER.search(complaint):
        return SlurmUnavailable(
            f"{_short(argv)}: slurmctld does not answer: {complaint or f'signal {-status}'}"
        )
    return SlurmRefused(f"{_short(argv)}: {complaint or f'exit status {status}'}")


def _short(argv: Sequence[str]) -> str:
    text = " ".join(argv)
    return text if len(text) <= 160 else text[:157] + "..."
