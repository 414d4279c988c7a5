"""What joiners take over from rank 0 beside the checkpoint's parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pollux.goodput import BatchLimits
from pollux.training.training import Training


def rank(**facts: Any) -> Any:
    return SimpleNamespace(models=[], **facts)


def test_a_joiner_adapts_the_batch_size_if_rank_0_does() -> None:
    """The environment of a companion job does not say.

    At another learning rate the joiner would train a model of its own.
    """
    first = rank(
        limits=BatchLimits(8, 64, 4, 32),
        most_per_gpu=64,
        adaptive=True,
        step=SimpleNamespace(looped=True, accumulates=True),
    )
    joiner = rank(
        limits=BatchLimits(8, 8, 4, 8),
        most_per_gpu=8,
        adaptive=False,
        step=SimpleNamespace(looped=False, accumulates=False),
    )
    Training.agree(joiner, Training.agreed(first))
    assert joiner == first
