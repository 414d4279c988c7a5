"""Find ranks whose parameters differ from rank 0's.

Ranks that begin with equal parameters and average their gradients stay equal to the last bit. Mistakes in a script make
them differ without an error: a pass through the unwrapped model, an optimizer that steps on one rank only, a seed that
changes a parameter. The check waits for the device once, so it runs only after the first steps, before checkpoints and
at the end.

Ranks on one type of device are compared to the last bit: the steps of a fine-tuning change norms by less than any
tolerance. Devices of different types may round differently.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pollux.data.identity import difference
from pollux.data.place import ElasticData
from pollux.data.stream import ElasticStream
from pollux.errors import DataError, RanksDiffer
from pollux.ranks.control import ControlExchange
from pollux.ranks.torch_internals import norms_of
from pollux.training.trained_model import TrainedModel
from pollux.training.training import Training

logger = logging.getLogger("pollux")

FIRST_STEPS = (1, 8)
"""Optimizer steps of an attempt after which ranks are compared."""

TOLERANCE = 1e-3
"""Relative difference of norms between GPUs of different types, before a checkpoint."""


def check_first(training: Training, exchange: ControlExchange, steps: int) -> None:
    """Compare the ranks after the first of `steps` among them. See `check_equal` and `check_stream`."""
    if steps in FIRST_STEPS:
        check_equal(training, exchange)
    if steps == 1:
        check_stream(training, exchange)


def check_equal(training: Training, exchange: ControlExchange) -> None:
    """Raise RanksDiffer on every rank if some rank's parameters differ. The reference is rank 0."""
    if exchange.group is None:
        return
    exactly = len(set(exchange.gather(training.profile.gpu_type))) == 1
    checksum = _bits if exactly else _norms
    found: list[list[float]] = exchange.gather([checksum(_compared(model)) for model in training.models])
    first = found[0]
    differ = [rank for rank, sums in enumerate(found) if not _alike(sums, first)]
    if not differ:
        return
    many = len(differ) > 1
    raise RanksDiffer(
        f"after optimizer step {training.progress.optimizer_steps} the parameters of rank{'s' if many else ''} "
        f"{', '.join(map(str, differ))} differ from rank 0's: each rank trains a model of its own. Call job.model(x) "
        "and not model(x) in the loop, call job.backward once for the sum of a pass's losses, checkpoint activations "
        "with use_reentrant=False, call optimizer.step() under `if job.sync_gradients:` on every rank, and change "
        "parameters on all ranks alike"
    )


def writes(training: Training) -> int:
    """Count the writes to the compared parameters, to see later whether there were more. Waits for no device."""
    return sum(p._version for model in training.models for p in _compared(model))


def as_left(training: Training) -> bool:
    """Tell whether the script has changed no parameter since its loop, as for a last test with its best weights."""
    return writes(training) == training.step.writes


def check_stream(training: Training, exchange: ControlExchange) -> None:
    """Warn where ranks read other samples of a stream than rank 0.

    A stream that augments its samples at random looks the same, so this is no error.
    """
    if exchange.group is None or not isinstance(training.data, ElasticStream):
        return
    found: list[tuple[int, int, int] | None] = exchange.gather(training.data.first_read)
    first = found[0]
    differ = [
        rank
        for rank, read in enumerate(found)
        if read is not None and first is not None and read[:2] == first[:2] and read[2] != first[2]
    ]
    if differ and exchange.rank == 0:
        logger.warning(
            "sample %d of the stream is another one on rank %s than on rank 0. A stream that divides itself by rank "
            "(split_by_node of webdataset), or that shuffles in another order on each rank, loses samples and repeats "
            "others: give every rank the same stream, and the loader divides it. Move random augmentation to "
            "job.loader(..., transform=...)",
            first[1] if first is not None else 0,
            ", ".join(map(str, differ)),
        )


def check_data(data: ElasticData, exchange: ControlExchange) -> None:
    """Compare the ranks' indexed data. Raises DataError for other lengths; warns of other samples."""
    mine = data.identity()
    if mine is None or exchange.group is None:
        return
    found = exchange.gather(mine)
    lengths = [each[0] for each in found]
    if len(set(lengths)) > 1:
        raise DataError(
            f"expected the same data on every rank, got datasets of {lengths} samples on ranks 0 to {len(found) - 1}"
        )
    differ = {
        rank: number for rank, each in enumerate(found) if (number := difference(each, found[0])) is not None
    }
    if differ and exchange.rank == 0:
        logger.warning(
            "sample %d of the dataset is another one on rank %s than on rank 0: samples are lost, and others repeated. "
            "Give every rank the same data in the same order (sort lists of files, give random_split a generator with "
            "a seed)",
            next(iter(differ.values())),
            ", ".join(map(str, differ)),
        )


def _alike(sums: Sequence[float], first: Sequence[float]) -> bool:
    """Compare the sums of two ranks; integers are those of `_bits`."""
    return all(
        a == b
        or (isinstance(a, float) and math.isnan(a) and math.isnan(b))
        or (isinstance(a, float) and math.isclose(a, b, rel_tol=TOLERANCE))
        for a, b in zip(sums, first, strict=True)
    )


def _compared(model: TrainedModel) -> list[Tensor]:
    """Return the parameters that the ranks keep equal; none if sharded."""
    wrapper = model.model
    if not isinstance(wrapper, DistributedDataParallel):
        return []
    ignored = getattr(wrapper, "parameters_to_ignore", ())  # the script keeps them apart on purpose
    params = model.module.named_parameters()
    return [p.detach() for name, p in params if p.requires_grad and name not in ignored and p.numel()]


def bit_sums(params: Sequence[Tensor]) -> Tensor:
    """Return a sum [n] over the bits of each parameter, without waiting for the device."""
    real = [torch.view_as_real(p) if p.is_complex() else p for p in params]
    sums = [p.view(_INTEGERS[p.itemsize]).sum(dtype=torch.int64) for p in real]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)


def _bits(params: Sequence[Tensor]) -> int:
    """Return a sum over the bits of the parameters, by place; 0 for none."""
    sums = bit_sums(params)
    places = 2 * torch.arange(len(sums), dtype=torch.int64, device=sums.device) + 1
    return int((sums * places).sum())


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type of as many bytes."""


def _norms(params: Sequence[Tensor]) -> float:
    """Return a sum of the parameters' norms, by place; 0 for none."""
    real = [p for p in params if not p.is_complex()]
    if not real:
        return 0.0
    norms = norms_of(real).double()
    places = torch.arange(1, len(norms) + 1, dtype=torch.float64, device=norms.device)
    return float(torch.dot(norms, places))
