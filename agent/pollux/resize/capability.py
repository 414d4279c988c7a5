"""How a job can be resized: in place, or only by a requeue."""

from __future__ import annotations

import gc
import logging
import os
import shutil
from collections.abc import Mapping

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from pollux.ranks.resharding import obstacle_to_resharding
from pollux.ranks.sharding import under_fully_shard
from pollux.ranks.torch_internals import process_groups
from pollux.ranks.world import World
from pollux.slurm_job.attempt import Attempt
from pollux.training.training import Training

logger = logging.getLogger("pollux")


def may_resize(attempt: Attempt, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether any loop of this attempt may be resized in place.

    `pollux run` has to have started it, in a Pollux job with checkpoints.
    """
    if attempt.access is None or attempt.directory is None or not environ.get("POLLUX_LAUNCHED_AT"):
        return False
    if not attempt.training.first or attempt.unshared:
        # A joiner runs the script from its beginning, and would join at its first training. It reads the way there in
        # the folder of checkpoints.
        return False
    if environ.get("POLLUX_LOST"):
        # The allocation has more GPUs than ranks: a placement no longer says which ranks stay.
        return False
    return _allowed(environ.get("POLLUX_RESIZE", ""))


def may_grow(world: World, attempt: Attempt, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks may join the job's only rank; its loop has the last word."""
    return not world.distributed and may_resize(attempt, environ)


def resizes_in_place(training: Training, attempt: Attempt, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this training can be resized in place, by how it was started and made; else only by a requeue.

    Called once, where its loop begins.
    """
    if not may_resize(attempt, environ):
        return False
    obstacle = obstacle_in_place(training)
    if obstacle is not None:
        logger.info("this job is not resized in place: %s", obstacle)
    return obstacle is None


def obstacle_in_place(training: Training) -> str | None:
    """Why ranks cannot join and leave the processes; None where they can."""
    if shutil.which("sbatch") is None:
        return "there is no sbatch here (inside a container?) to submit a companion job"
    first = training.models[0]
    if under_fully_shard(first.module):
        return obstacle_to_resharding(
            first.module, first.optimizer, training.script_part
        ) or _obstacle_in_script(training)
    if not isinstance(first.model, DistributedDataParallel):
        return "its model is not wrapped in DistributedDataParallel"
    return _obstacle_in_script(training)


def _obstacle_in_script(training: Training) -> str | None:
    """What the script or a library made for the present number of ranks."""
    if training.tied:
        return training.tied
    first, world = training.models[0], training.world
    sharded = under_fully_shard(first.module)
    if len(training.models) > 1:
        return "it trains several models"
    if not (world.own or sharded):
        return "its process group is the script's own"
    if not training.step.managed:
        return "its epochs are not counted by job.epochs"
    if first.comm_hook is not None and first.comm_hook[0] is not None:
        return "the state of its communication hook may know of the present ranks"
    # The default one and the agent's own: for its decisions, and for checkpoints of all ranks.
    agents = (world.control is not None) * (1 + sharded)
    if len(process_groups()) > 1 + agents:
        return "its script has made process groups"
    # A sampler holds the number of ranks from when it was made, and would go on dividing by that.
    followed = set(map(id, training.followed))
    samplers = (each for each in gc.get_objects() if issubclass(type(each), DistributedSampler))
    if any(id(sampler) not in followed for sampler in samplers):
        return "its script divides data by a DistributedSampler"
    return None


def _allowed(text: str) -> bool:
    """Whether the directive `#POLLUX resize=` allows it."""
    word = text.strip().lower() or "in-place"
    if word not in ("requeue", "in-place"):
        logger.warning(
            "expected POLLUX_RESIZE to be one of requeue, in-place, got %r: requeue is assumed", text
        )
    return word == "in-place"
