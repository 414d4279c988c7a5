"""The job's environment: launch times, checkpoint directory, numbers."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pollux.errors import PolluxAgentError
from pollux.private_folder import folder_of_this_user
from pollux.slurm_job.access import in_pollux_job
from pollux.slurm_job.allocation import show_job
from pollux.slurm_job.trainings import RUN

CONTAINER = "POLLUX_CONTAINER"
"""Command inside which `pollux run` starts the launcher of every node."""
BATCH_PYTHON = "POLLUX_BATCH_PYTHON"
"""The interpreter of `pollux run` in the batch script, outside of the container, for companions' batch scripts."""
CHOSEN_INTERFACE = "POLLUX_CHOSEN_INTERFACE"
"""Set in ranks whose GLOO_SOCKET_IFNAME is the launcher's choice for their node, and not the user's word."""
LENT_RANKS = "POLLUX_LENT_RANKS"
"""Number of ranks that a companion job lends, set in the job's own ranks: when such a rank loses another, the launcher
starts all ranks again."""


@dataclass
class Times:
    """When this attempt reached each stage of its start. POSIX times, 0 where it did not (yet)."""

    launched_at: float = 0.0
    imported_at: float = 0.0
    rendezvous_at: float = 0.0
    attached_at: float = 0.0
    restored_at: float = 0.0
    first_step_at: float | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Times:
        """Return the launcher's two times; without a launcher, now."""
        now = time.time()
        return cls(
            launched_at=number(environ, "POLLUX_LAUNCHED_AT", now),
            imported_at=number(environ, "POLLUX_IMPORTED_AT", now),
        )


def checkpoint_directory(given: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> Path | None:
    """Where the checkpoints of a run's first training go.

    The argument, or the job's own folder; in it a folder of the run, unless it is the job's first one (see
    `trainings`). A companion's is its parent's.
    """
    if given is None and environ.get("POLLUX_COMPANION"):
        parents = Path(environ["POLLUX_COMPANION"]).parent
        return parents.parent if parents.name.startswith("attach-") else parents
    folder = Path(given) if given is not None else job_folder(environ)
    run = environ.get(RUN, "")
    return folder / f"run-{run}" if folder is not None and run else folder


def job_folder(environ: Mapping[str, str]) -> Path | None:
    """The job's folder: in a Pollux job one of its own, in POLLUX_CHECKPOINT_DIR or beside where it was submitted.

    Outside a Pollux job, POLLUX_CHECKPOINT_DIR, if that is set. Of the job's own, because a variable exported once is
    shared by many jobs, and a new cluster counts its jobs from 1 again. It needs no answer of the gateway, so that a
    job always goes on where it was.
    """
    named = environ.get("POLLUX_CHECKPOINT_DIR")
    job_id = environ.get("SLURM_JOB_ID")
    if not in_pollux_job(environ):
        return Path(named) if named else None
    own = "-".join(filter(None, (job_id, environ.get("POLLUX_SUBMITTED"))))
    beside = Path(environ.get("SLURM_SUBMIT_DIR") or Path.cwd()) / "pollux-checkpoints"
    return (Path(named) if named else folder_of_this_user(beside, own, make=True)) / own


def time_limit_at(environ: Mapping[str, str], *, ask: bool = False) -> float | None:
    """When Slurm ends this job by its time limit; POSIX seconds.

    None outside Slurm, without a limit, and where Slurm does not say. `ask`: Slurm itself, and not the environment,
    which keeps the limit that the job began with.
    """
    end, job_id = environ.get("SLURM_JOB_END_TIME", ""), environ.get("SLURM_JOB_ID")
    if job_id and end.isdigit() and not ask:  # Slurm 23.02 and later
        return float(end)
    shown = show_job(job_id) if job_id else None
    found = re.search(r"(?:^| )EndTime=(\d\S*)", shown or "")
    try:
        return None if found is None else datetime.fromisoformat(found.group(1)).timestamp()
    except ValueError:
        return None


def yes(environ: Mapping[str, str], name: str, default: bool) -> bool:
    """Parse a variable that is yes or no; empty: `default`. Raises PolluxAgentError."""
    match environ.get(name, "").strip().lower():
        case "":
            return default
        case "yes" | "true" | "1" | "on":
            return True
        case "no" | "false" | "0" | "off":
            return False
        case other:
            raise PolluxAgentError(f"expected {name} to be yes or no, got {other!r}")


def number(environ: Mapping[str, str], name: str, default: float) -> float:
    """Parse a variable of seconds or a count. Raises PolluxAgentError."""
    text = environ.get(name, "")
    if not text:
        return default
    try:
        return float(text)
    except ValueError:
        raise PolluxAgentError(f"expected {name} to be a number, got {text!r}") from None
