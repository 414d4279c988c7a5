"""What the doctor tries instead of reading: a job that is held, and files as their readers see them."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from polluxd.config.config_file import Config
from polluxd.errors import SlurmError, SlurmRefused
from polluxd.slurm.configuration import Slurm

from .findings import Finding, fault, ok, warning
from .hooks import Site

STALE_S = 180.0
"""Age of the heartbeat from which the submission hook takes polluxd for dead."""
_SCRIPT = """\
#!/bin/sh
#SBATCH --job-name=pollux-doctor --gres=gpu:1 --time=1 --output=/dev/null --chdir=/
#POLLUX min-gpus=1
true
"""
_KEPT_BACK = "Comment=pollux: while the reason is BeginTime"
"""What the hook writes into a job to which it gives a lease."""
_LOG = "look for `lua` and `pollux` in slurmctld's log, run `polluxctl hooks install`, and restart slurmctld"


def canary(slurm: Slurm, site: Site, config: Config | None) -> Iterator[Finding]:
    """Submit a held job as polluxd's user, look at it, and cancel it."""
    options = config.slurm.canary_options if config is not None else ()
    with tempfile.TemporaryDirectory(prefix="pollux-doctor-") as folder:
        os.chmod(folder, 0o755)
        script = Path(folder) / "canary.sh"
        script.write_text(_SCRIPT)
        script.chmod(0o644)
        try:
            done = slurm.run("sbatch", "--parsable", "--hold", *options, str(script), user=site.user)
        except SlurmRefused as error:
            yield warning(
                "canary",
                f"sbatch refuses a held job with #POLLUX{' and ' if options else ''}{' '.join(options)}: {error}",
                "if your site asks every job for an account, a time or a partition, name them in polluxd.toml, "
                f'[slurm]: canary_options = ["--account=NAME", "--time=10"]. If not, {_LOG}',
            )
            return
        except SlurmError as error:
            yield fault("canary", str(error), "start slurmctld and munge; look at slurmctld's log")
            return
        job = done.stdout.strip().partition(";")[0]
        try:
            record = slurm.ask("scontrol", "-o", "show", "job", job)
        except SlurmError as error:
            yield fault("canary", f"job {job} cannot be looked at: {error}", "look at slurmctld's log")
            return
        finally:
            slurm.ask("scancel", job)
    if not re.search(r"\bAdminComment=pollux:", record):
        yield fault(
            "canary", "a job with #POLLUX has no mark of Pollux: slurmctld does not run its hook", _LOG
        )
        return
    yield ok("canary", "a held job with #POLLUX has Pollux' mark")
    if "--open-mode=append" in done.stderr:
        yield fault(
            "canary",
            "sbatch does not run Pollux' part of cli_filter.lua: each move would empty a job's output file",
            "CliFilterPlugins=lua in slurm.conf; `polluxctl hooks install` on this machine",
        )
    if _age(config) < STALE_S and _KEPT_BACK not in record:
        yield fault(
            "canary",
            "the hook gives a job no lease though polluxd's heartbeat is fresh: all Pollux jobs start as plain ones",
            "make the heartbeat's folder readable for Slurm's user (chmod 755); `polluxctl hooks install`",
        )


def heartbeat(slurm_user: str, config: Config | None) -> Iterator[Finding]:
    """Read the heartbeat as slurmctld does."""
    path = config.slurm.heartbeat_file if config is not None else None
    if path is None or not path.exists():
        return  # no polluxd in mode enforce has run yet: `leader` says so
    if not _reads(slurm_user, path):
        yield fault(
            "heartbeat",
            f"Slurm's user {slurm_user} cannot read {path}: all Pollux jobs start as plain ones",
            f"chmod 755 {path.parent} && chmod 644 {path}",
        )
    elif (age := _age(config)) > STALE_S:
        yield warning(
            "heartbeat",
            f"{path} is {age:.0f} s old: the submission hook takes polluxd for dead",
            "systemctl status polluxd",
        )


def _reads(user: str, path: Path) -> bool:
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        return True  # not a user of this machine: slurmctld runs elsewhere
    if os.geteuid() != 0:
        return os.access(path, os.R_OK)
    done = subprocess.run(
        ["cat", str(path)],
        user=account.pw_uid,
        group=account.pw_gid,
        extra_groups=os.getgrouplist(user, account.pw_gid),
        capture_output=True,
        timeout=10,
        check=False,
    )
    return done.returncode == 0


def _age(config: Config | None) -> float:
    """Seconds since polluxd, in mode enforce, touched the heartbeat; inf where it never did."""
    path = config.slurm.heartbeat_file if config is not None else None
    try:
        return time.time() - float(path.read_text().split()[0]) if path is not None else float("inf")
    except (OSError, ValueError, IndexError):
        return float("inf")
