"""`polluxctl usage JOB`: a job added up over its moves and companions."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from polluxd.errors import PolluxError, SlurmRefused
from polluxd.site.slurm_checks import Slurm
from polluxd.slurm.accounting import read_usage

from . import access, answers
from .access import ConfigOption, JsonOption
from .output import Column, clock, duration, emit, plain
from .pinning import JobArgument

USAGE_COLUMNS = (
    Column("job_id", "JOB", right=True),
    Column("state", "STATE", plain),
    Column("submitted_at", "SUBMITTED", clock, rank=3),
    Column("ended_at", "ENDED", clock, rank=2),
    Column("waited_s", "WAITED", duration, right=True),
    Column("wall_s", "RAN", duration, right=True),
    Column("restarts", "RESTARTS", right=True),
    Column("companions", "COMPANIONS", right=True, rank=4),
    Column("companion_gpu_s", "THEIR GPU SECONDS", plain, right=True, rank=1),
    Column("gpu_s", "GPU SECONDS", plain, right=True),
    Column("energy_j", "ENERGY [J]", plain, right=True, rank=5),
)


def usage(job: JobArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Add up what a job used over its moves and companions, from sacct."""
    try:
        found = read_usage(Slurm(_slurm_conf(config), timeout=60.0).ask, job)
    except SlurmRefused as error:
        raise PolluxError(
            f"{error}; usage needs Slurm's accounting (slurmdbd). Without it, polluxctl history {job} shows the GPUs "
            "over time"
        ) from None
    if found is None:
        raise PolluxError(f"Slurm's accounting shows you no job {job} (`sacct --duplicates -j {job}`)")
    emit([asdict(found)], USAGE_COLUMNS, as_json=as_json, console=access.console(), empty="")


def _slurm_conf(config: Path | None) -> Path | None:
    if answers.may_read_database(config):
        named = access.configuration(config).slurm.conf
        if named:
            return Path(named)
    conf = os.environ.get("SLURM_CONF")
    return Path(conf) if conf else None
