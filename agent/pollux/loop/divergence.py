"""Find ranks whose parameters differ from rank 0's.

Ranks that begin with equal parameters and average their gradients stay equal to the last bit. Mistakes in a script make
them differ without an error: a pass through the unwrapped model, an optimizer that steps on one rank only, a seed that
changes a parameter. The check waits for the device once, so it runs only after the first steps and before checkpoints.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from pollux.data.divided import DividedStream
from pollux.data.stream import ElasticStream
from pollux.errors import RanksDiffer
from pollux.ranks.control import ControlExchange
from pollux.ranks.torch_internals import foreach_norm
from pollux.training.trained_model import TrainedModel
from pollux.training.training import Training

logger = logging.getLogger("pollux")

FIRST_STEPS = (1, 8)
"""Optimizer steps of an attempt after which ranks are compared to the last bit."""

TOLERANCE = 1e-3
"""Relative difference before a checkpoint: GPUs of different types may round differently."""


def check_first(training: Training, exchange: ControlExchange, steps: int) -> None:
    """Compare the ranks after the first of `steps` among them.

    See `check_equal` and `check_stream`.
    """
    if steps in FIRST_STEPS:
        check_equal(training, exchange, exactly=True)
    if steps == 1:
        check_stream(training, exchange)


def check_equal(training: Training, exchange: ControlExchange, *, exactly: bool) -> None:
    """Raise RanksDiffer on every rank if some rank's parameters differ.

    The reference is rank 0. `exactly` compares to the last bit if all ranks run on one type of device.
    """
    if exchange.group is None:
        return
    found: list[tuple[str, list[float]]] = exchange.gather(
        (training.profile.gpu_type, [_checksum(model) for model in training.models])
    )
    exactly = exactly and len({device for device, _ in found}) == 1
    first = found[0][1]
    differ = [rank for rank, (_, sums) in enumerate(found) if not _alike(sums, first, exactly)]
    if not differ:
        return
    many = len(differ) > 1
    raise RanksDiffer(
        f"after optimizer step {training.progress.optimizer_steps} the parameters of rank{'s' if many else ''} "
        f"{', '.join(map(str, differ))} differ from rank 0's: each rank trains a model of its own. Call job.model(x) "
        "and not model(x) in the loop, call optimizer.step() under `if job.sync_gradients:` on every rank, and change "
        "parameters on all ranks alike"
    )


def check_stream(training: Training, exchange: ControlExchange) -> None:
    """Warn where ranks read other samples of a stream than rank 0.

    A stream that augments its samples at random looks the same, so this is no error.
    """
    if exchange.group is None or not isinstance(training.data, ElasticStream | DividedStream):
        return
    found: list[tuple[int, int, int] | None] = exchange.gather(training.data.first_read)
    first = found[0]
    if training.data.divided:
        sums = {read[2] for read in found if read is not None}
        if len(sums) == 1 and sums != {0} and exchange.rank == 0:
            logger.warning(
                "the first sample of the stream is the same one on all %d ranks, though job.loader(..., divided=True) "
                "says that the stream divides itself by rank: leave divided=True out, and the loader divides it",
                len(found),
            )
        return
    differ = [
        rank
        for rank, read in enumerate(found)
        if read is not None and first is not None and read[:2] == first[:2] and read[2] != first[2]
    ]
    if differ and exchange.rank == 0:
        logger.warning(
            "sample %d of the stream is another one on rank %s than on rank 0. A stream that divides itself by rank "
            "(split_by_node of webdataset) needs job.loader(..., divided=True). One that shuffles in another order on "
            "each rank loses samples and repeats others: give every rank the same stream, and the loader divides it. "
            "Move random augmentation to job.loader(..., transform=...)",
            first[1] if first is not None else 0,
            ", ".join(map(str, differ)),
        )


def _alike(sums: Sequence[float], first: Sequence[float], exactly: bool) -> bool:
    return all(
        a == b or (math.isnan(a) and math.isnan(b)) or (not exactly and math.isclose(a, b, rel_tol=TOLERANCE))
        for a, b in zip(sums, first, strict=True)
    )


def _checksum(model: TrainedModel) -> float:
    """Return a sum that changes with any parameter the ranks keep equal.

    Return 0 for a sharded model.
    """
    wrapper = model.model
    if not isinstance(wrapper, DistributedDataParallel):
        return 0.0
    ignored = getattr(wrapper, "parameters_to_ignore", ())  # the script keeps them apart on purpose
    params = [
        p.detach()
        for name, p in model.module.named_parameters()
        if p.requires_grad and name not in ignored and not p.is_complex() and p.numel()
    ]
    if not params:
        return 0.0
    norms = torch.stack([norm.double() for norm in foreach_norm(params, 2, torch.float32)])
    places = torch.arange(1, len(norms) + 1, dtype=torch.float64, device=norms.device)
    return float(torch.dot(norms, places))
