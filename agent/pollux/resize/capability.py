"""What a job is able to when it is to be resized: to go on in place, to be relaunched, or only to be requeued."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from pollux.ranks.torch_internals import process_groups, uncompiled

if TYPE_CHECKING:
    from pollux.checkpoint.restart import Restart
    from pollux.loop.session import Job

logger = logging.getLogger("pollux")

INTEGRATIONS = ("huggingface", "lightning", "accelerate")
"""Loops of other libraries: they keep the number of ranks in places of their own."""


class ResizeCapability(StrEnum):
    """From the least to the most; the directive `#POLLUX resize=` bounds it."""

    REQUEUE = "requeue"
    RELAUNCH = "relaunch"
    """The processes start anew in what is left of the allocation."""
    IN_PLACE = "in-place"
    """The processes go on, with fewer or more of their kind."""


def least_ability(restart: Restart, environ: Mapping[str, str] = os.environ) -> ResizeCapability:
    """What any loop is able to that is started by `pollux run`, in a Pollux job with checkpoints: a relaunch."""
    if restart.ticket is None or restart.directory is None or not environ.get("POLLUX_LAUNCHED_AT"):
        return ResizeCapability.REQUEUE
    return lesser(ResizeCapability.RELAUNCH, _bound(environ.get("POLLUX_RESIZE", "")))


def lesser(one: ResizeCapability, other: ResizeCapability) -> ResizeCapability:
    """The lesser one of two."""
    return min(one, other, key=list(ResizeCapability).index)


def ability_of(job: Job, restart: Restart, environ: Mapping[str, str] = os.environ) -> ResizeCapability:
    """What this job is able to, by how it was started and made. Called once, where its loop begins."""
    least, bound = least_ability(restart, environ), _bound(environ.get("POLLUX_RESIZE", ""))
    if least is not ResizeCapability.RELAUNCH or bound is not ResizeCapability.IN_PLACE:
        return least
    obstacle = obstacle_in_place(job)
    if obstacle is not None:
        logger.info("not to be resized in place, but relaunched: %s", obstacle)
        return ResizeCapability.RELAUNCH
    return ResizeCapability.IN_PLACE


def obstacle_in_place(job: Job) -> str | None:
    """Why the job's processes cannot outlive a change of ranks; None where they can."""
    if len(job.stepper.trained_models) > 1:
        return "it trains several models"
    if not isinstance(job.model, DistributedDataParallel):
        return "its model is not wrapped in DistributedDataParallel"
    if not job.world.own:
        return "its process group is the script's own"
    if not job.stepper.managed:
        return "its epochs are not counted by job.epochs"
    if any(f"pollux.integrations.{name}" in sys.modules for name in INTEGRATIONS):
        return "another library runs its loop"
    if uncompiled(job.module) is not job.module:
        return "its model is compiled, which takes joiners too long"
    if job.stepper.trained_models[0].comm_hook is not None:
        return "its communication hook may know of the present ranks"
    # The default one and the agent's own.
    if process_groups() > (2 if job.world.control is not None else 1):
        return "its script has made process groups"
    # It holds the number of ranks from when it was made, and would go on dividing by that.
    if any(issubclass(type(found), DistributedSampler) for found in gc.get_objects()):
        return "its script divides data by a DistributedSampler"
    return None


def _bound(text: str) -> ResizeCapability:
    try:
        return ResizeCapability(text.strip().lower() or ResizeCapability.IN_PLACE)
    except ValueError:
        logger.warning(
            "expected POLLUX_RESIZE to be one of %s, got %r: taken as requeue",
            ", ".join(ResizeCapability),
            text,
        )
        return ResizeCapability.REQUEUE
