"""What the user's training loop holds: the loader to iterate over, and the context of a micro-batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from pollux.errors import RankLost
from pollux.loop.stepper import Stepper
from pollux.noise.measuring import NoiseMeter
from pollux.ranks.control import lost_peer
from pollux.ranks.sharding import synchronise

if TYPE_CHECKING:
    from pollux.loop.session import Job


class TrainingLoader:
    """What `job.loader` returns: iterate over it once per epoch. `data` is the loader beneath."""

    def __init__(self, job: Job, stepper: Stepper) -> None:
        self.job = job
        self.data = stepper.data
        self._stepper = stepper

    def __len__(self) -> int:
        """Micro-batches in a whole pass at the present batch size."""
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        stepper, data = self._stepper, self.data
        stepper.enter()
        try:
            while not stepper.epoch_done():
                micro_batches = iter(data)
                while True:
                    stepper.plan()
                    try:
                        batch = next(micro_batches)
                    except StopIteration:
                        break
                    stepper.begin_pass()
                    yield batch
                    stepper.end_pass()
                    if stepper.stepped:
                        ended = data.last_of_pass
                        stepper.end_step()
                        if ended or stepper.epoch_done():
                            break
                    elif stepper.skipped:
                        stepper.skip_step()
        except RuntimeError as error:
            if lost_peer(error):
                raise RankLost(
                    f"another rank ended between two passes; its own output says why: {error}"
                ) from error
            raise
        finally:
            stepper.leave()


def weigh(stepper: Stepper) -> float:
    """The weight of this pass in the step's mean, by which the caller multiplies its mean loss."""
    if stepper.group is not None:
        stepper.group.weighed = True
    return stepper.share


class MicroBatch:
    """One forward and backward pass: without synchronisation except in a step's last one."""

    def __init__(self, model: torch.nn.Module, stepper: Stepper, meter: NoiseMeter) -> None:
        self._model = model
        self._stepper = stepper
        self._meter = meter
        self._unsynchronised: Any = None
        self._sharded = meter.sharded

    def __enter__(self) -> None:
        stepper = self._stepper
        stepper.accumulates = True
        if self._sharded:
            # One rank has nothing to communicate: it accumulates in its shards, where no second copy is needed.
            self._reduce(stepper.synchronises or not self._meter.distributed)
        elif (
            isinstance(self._model, DistributedDataParallel)
            and not stepper.synchronises
            # A static graph knows no `no_sync`: synchronised each time, the passes give the same sum.
            and not self._model.static_graph
        ):
            self._unsynchronised = self._model.no_sync()
            self._unsynchronised.__enter__()
        self._meter.before_pass(stepper.synchronises)

    def _reduce(self, reduce: bool) -> None:
        if self._meter.reduces is not reduce:  # it walks through all modules
            synchronise(self._model, reduce)
            self._meter.reduces = reduce

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        stepper = self._stepper
        if self._unsynchronised is not None:
            self._unsynchronised.__exit__(kind, error, trace)
        if self._sharded and not stepper.synchronises:
            self._reduce(True)  # for passes outside of this context
        if error is not None:
            self._meter.abandon_pass()
            if lost_peer(error):
                raise RankLost(
                    "another rank ended in a pass that needs all of them; its own output says why. Every rank "
                    f"has to make the same number of passes: {error}"
                ) from error
            return stepper.memory.caught(error, stepper)
        share = stepper.share
        if share != 1.0 and stepper.group is not None and not stepper.group.weighed:
            warnings.warn(
                "expected job.backward(loss) in job.micro_batch(), which gives this pass its weight of "
                f"{share:g} in the step; after loss.backward() it counts as if that were 1",
                stacklevel=2,
            )
        stepper.timer.passed()
        self._meter.after_pass(stepper.synchronises, share)
        return False
