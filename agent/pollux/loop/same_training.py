"""A training that has ended is never taken for another one.

An attempt with nothing left to train returns the restored weights at once, and its script reports them as the result of
what it says now: another fold, another seed, another learning rate. So the two are compared first.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pollux.errors import ForeignCheckpoint
from pollux.loop.notices import notice
from pollux.ranks.control import ControlExchange
from pollux.slurm_job.access import in_pollux_job
from pollux.slurm_job.attempt import Attempt
from pollux.training.training import Training

_SEEDS = 1 << 32
"""torch draws a seed of its own from 2 ** 53 numbers where the script gives none."""

ANOTHER = (
    "the training{} has ended, and this is another one: {}. It would report the result of that one. Give each training "
    'a name, attach(..., name=f"fold-{{k}}"), or a checkpoint_dir of its own; to train this one again, move the folder '
    "away"
)


def origin(attempt: Attempt) -> dict[str, Any]:
    """What a checkpoint keeps of where and how this attempt began the training."""
    site, seed = attempt.training.site, torch.initial_seed()
    return {
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else [],
        "line": site.lines[-1] if site and site.lines else "",
        "code": site.code if site else 0,
        "loops": site.loops if site else "",
        "seed": seed if seed < _SEEDS else None,
    }


def _differences(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """How another training was begun, in words."""
    found = []
    same_job = in_pollux_job(os.environ) and mine["job"] == other["job"]
    if not same_job and mine["command"] != other["command"]:  # within a job, `runs` has looked at it
        found.append(f"it was `{shlex.join(other['command'])}`, and is `{shlex.join(mine['command'])}`")
    if mine["loops"] != other["loops"]:
        found.append(
            f"it was that of {other['loops'] or 'no loop'}, and is that of {mine['loops'] or 'no loop'}"
        )
    if mine["code"] == other["code"] and mine["line"] != other["line"]:
        found.append(f"it was attached at {other['line']}, and is at {mine['line']}")
    seeds = mine["seed"], other["seed"]
    if None not in seeds and seeds[0] != seeds[1] and (mine["loops"] or not same_job):
        found.append(f"its seed was {seeds[1]}, and is {seeds[0]}")
    return found


def say_other_command(training: Training, directory: Path | None) -> None:
    """On rank 0, after a restore: name the command that began the training, where it was another one."""
    record = training.models[0].record
    if record.origin_restored and (found := _differences(record.origin, record.origin_restored)):
        notice(f"goes on with the training in {directory}, begun otherwise: {'; '.join(found)}")


def check_ended(
    training: Training, exchange: ControlExchange, directory: Path | None, gpus: int | None
) -> None:
    """Before an attempt that has nothing left to train. `gpus`: of the attempt before.

    Raises ForeignCheckpoint on all ranks if the script would take another training's result for its own.
    """
    record = training.models[0].record
    found = _differences(record.origin, record.origin_restored) if record.origin_restored else []
    if gpus == training.world.size:  # a rate may follow the number of ranks
        found += record.edited
    if training.data.other_data and record.origin.get("seed") is not None:  # else it may be drawn at random
        found.append(training.data.other_data)
    if why := exchange.gather("; ".join(found[:4]))[0]:
        raise ForeignCheckpoint(ANOTHER.format(f" in {directory}" if directory else "", why))
