"""Name a run that `pollux run` did not start: torchrun, srun or python in the batch script of a Pollux job.

Rank 0 does what `pollux run` does otherwise (`pollux.slurm_job.runs`).
"""

from __future__ import annotations

import atexit
import os
import sys

from pollux.errors import LaunchError, PolluxAgentError
from pollux.loop.notices import notice
from pollux.ranks.gathering import as_rank_0
from pollux.ranks.world import World
from pollux.slurm_job import runs
from pollux.slurm_job.access import in_pollux_job
from pollux.slurm_job.environment import job_folder
from pollux.slurm_job.trainings import PROCESS, RUN


def name_run(world: World) -> None:
    """Set the variable that names this run, on all ranks alike. Raises LaunchError where it cannot be told apart."""
    if RUN in os.environ or not in_pollux_job(os.environ):
        return
    begun: dict[str, str] = {}
    trouble = ""
    if world.rank == 0:
        try:
            begun, sentence = runs.begin_here(sys.argv, None)
            if sentence:
                notice(sentence)
            atexit.register(_end)
        except PolluxAgentError as error:
            trouble = str(error)
    begun, trouble = as_rank_0(world.control, (begun, trouble))
    if trouble:
        raise LaunchError(trouble)
    os.environ[RUN] = begun.get(RUN, "")
    if world.rank == 0:
        os.environ |= begun


def _end() -> None:
    """The process ends by itself."""
    folder = job_folder(os.environ)
    if folder is not None and getattr(sys, "last_value", None) is None:
        runs.end(folder, os.environ.get(PROCESS, ""), 0)
