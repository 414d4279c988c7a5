"""A training that has ended is never taken for another one.

An attempt with nothing left to train returns the restored weights at once, and its script reports them as the result of
what it says now: another fold, another seed, another learning rate. So the two are compared first.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pollux.errors import ForeignCheckpoint
from pollux.loop.notices import notice
from pollux.ranks.control import ControlExchange
from pollux.slurm_job.access import in_pollux_job
from pollux.slurm_job.attempt import Attempt
from pollux.slurm_job.runs import is_command_of_run
from pollux.training.training import Training

_SEEDS = 1 << 32
"""torch draws a seed of its own from 2 ** 53 numbers where the script gives none."""

ANOTHER = (
    "the training{} has ended, and this is another one: {}. It would report the result of that one. Give each training "
    'a name, attach(..., name=f"fold-{{k}}"), or a checkpoint_dir of its own; to train this one again, move the folder '
    "away"
)


def origin(attempt: Attempt, model: torch.nn.Module) -> dict[str, Any]:
    """What a checkpoint keeps of where and how this attempt began the training."""
    site, seed = attempt.training.site, torch.initial_seed()
    return {
        "job": os.environ.get("SLURM_JOB_ID", ""),
        # A notebook's kernel is given a file of each start.
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]]
        if sys.argv and "ipykernel" not in sys.modules
        else [],
        "arguments": dict(site.arguments) if site else {},
        "loops": site.loops if site else "",
        "model": zlib.crc32(re.sub(r"0x[0-9a-f]+", "", repr(model)).encode()),
        "seed": seed if seed < _SEEDS else None,
    }


def _differences(mine: Mapping[str, Any], other: Mapping[str, Any], *, resized: bool) -> list[str]:
    """How another training was begun, in words. `resized`: on another number of GPUs, which numbers may follow."""
    found = []
    same_job = in_pollux_job(os.environ) and mine["job"] == other["job"]
    looked_at = same_job and mine["command"] and is_command_of_run(mine["command"])
    if not looked_at and mine["command"] != other["command"]:
        found.append(f"it was `{shlex.join(other['command'])}`, and is `{shlex.join(mine['command'])}`")
    if mine["loops"] != other["loops"]:
        found.append(
            f"it was that of {other['loops'] or 'no loop'}, and is that of {mine['loops'] or 'no loop'}"
        )
    before = other.get("arguments", mine["arguments"])
    changed = [
        name
        for name in sorted(mine["arguments"].keys() | before.keys())
        if mine["arguments"].get(name) != before.get(name)
        and not (resized and (mine["arguments"].get(name) or before[name]).startswith("#"))
    ]
    if changed:
        found.append(f"its call had another {', '.join(changed[:4])}")
    if mine["model"] != other.get("model", mine["model"]):
        found.append("its model had other layers, or layers with other settings")
    seeds = mine["seed"], other["seed"]
    if None not in seeds and seeds[0] != seeds[1] and (mine["loops"] or not looked_at):
        found.append(f"its seed was {seeds[1]}, and is {seeds[0]}")
    return found


def say_other_command(training: Training, directory: Path | None, gpus: int | None) -> None:
    """On rank 0, after a restore: say how the training was begun, where it was otherwise. `gpus`: as below."""
    record = training.models[0].record
    mine, other = record.origin, record.origin_restored
    if other and (found := _differences(mine, other, resized=gpus != training.world.size)):
        notice(f"goes on with the training in {directory}, begun otherwise: {'; '.join(found)}")


def check_ended(
    training: Training, exchange: ControlExchange, directory: Path | None, gpus: int | None
) -> None:
    """Before an attempt that has nothing left to train. `gpus`: of the attempt before.

    Raises ForeignCheckpoint on all ranks if the script would take another training's result for its own.
    """
    record = training.models[0].record
    resized, other = gpus != training.world.size, record.origin_restored
    found = _differences(record.origin, other, resized=resized) if other else []
    if not resized:  # a rate may follow the number of ranks
        found += record.edited
    if training.data.other_data and record.origin.get("seed") is not None:  # else it may be drawn at random
        found.append(training.data.other_data)
    if why := exchange.gather("; ".join(found[:4]))[0]:
        raise ForeignCheckpoint(ANOTHER.format(f" in {directory}" if directory else "", why))
