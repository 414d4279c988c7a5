"""Moving averages of weights whose decay is made for steps of M0 examples.

A step of a larger batch stands for `gain` of them. An average that is updated once a step, with decay d, has to decay
by d ** gain there, or it ends far behind the model: 360 steps instead of 1,700 leave 70 % of the first weights in an
average of decay 0.999, and not 18 % (Busbridge et al., 2023).

The agent follows the averages that it sees: torch's AveragedModel, and objects that have a decay and a method that
updates (timm, torch_ema, ema_pytorch, diffusers, most scripts' own). The decay that the script reads and saves stays.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

logger = logging.getLogger("pollux")

DECAYS = ("decay", "beta", "ema_decay")
UPDATES = ("update", "update_parameters", "step")
"""Names in the libraries' own classes."""

_MARK = "_pollux_follows"

_NAMED = re.compile("ema|averag", re.IGNORECASE)
"""Other objects that have a beta and a step are no averages of weights: a replay buffer, say."""

NOT_FOLLOWED = (
    "the agent cannot change the decay of the moving average in this %s. Where the batch size grows, fewer updates "
    "stand for the same examples: let it decay by decay ** job.gain in each"
)


def follow_gain(state: object, gain: Callable[[], float]) -> None:
    """Let the decay of each moving average in a script's `state=` follow the gain of the last optimizer step.

    `state` is a dict of objects, one object, or one whose `averages` yields them (the callbacks of a library). `gain`
    returns the steps of M0 examples that the step was worth. Other objects are left alone, and so is an average whose
    decay the script already changes by itself.
    """
    listed = getattr(state, "averages", None)
    found = listed() if callable(listed) else state.values() if isinstance(state, Mapping) else [state]
    for each in found:
        if isinstance(each, AveragedModel):
            _follow_averaged(each, gain)
        elif _NAMED.search(type(each).__name__) and not hasattr(each, _MARK):
            _follow_attribute(each, gain)


def _follow_averaged(average: AveragedModel, gain: Callable[[], float]) -> None:
    for name, made, probe in (
        ("multi_avg_fn", get_ema_multi_avg_fn, _kept_of_many),
        ("avg_fn", get_ema_avg_fn, _kept_of_one),
    ):
        own = getattr(average, name)
        if own is None or hasattr(own, _MARK):
            continue
        first, later = (probe(own, updates) for updates in (1, 1000))
        if first is None or first != later:
            # Equal weights (SWA) are no decay.
            if first is None or later is None or abs(first - 0.5) > 1e-3 or abs(later - 1000 / 1001) > 1e-6:
                logger.warning(NOT_FOLLOWED, type(average).__name__)
        elif 0.0 < first < 1.0:
            setattr(average, name, _adapted(own, made, probe, first, gain))


def _adapted(
    own: Callable[..., Any],
    made: Callable[[float], Callable[..., Any]],
    probe: Callable[[Callable[..., Any], int], float | None],
    decay: float,
    gain: Callable[[], float],
) -> Callable[..., Any]:
    @wraps(own)
    def averaged(*args: Any) -> Any:
        worth = gain()
        if worth == 1.0 or probe(own, 1) != decay:
            return own(*args)  # the script's own function follows something itself
        return made(decay**worth)(*args)

    setattr(averaged, _MARK, True)
    return averaged


def _kept_of_one(function: Callable[..., Any], updates: int) -> float | None:
    """Return the share of the average that a function for one tensor keeps; None if that cannot be told."""
    try:
        return float(function(torch.ones(()), torch.zeros(()), torch.tensor(updates)))
    except Exception:  # the script's function
        return None


def _kept_of_many(function: Callable[..., Any], updates: int) -> float | None:
    """Return the same of a function that changes a list of tensors."""
    average: list[Tensor] = [torch.ones(())]
    try:
        function(average, [torch.zeros(())], torch.tensor(updates))
    except Exception:  # the script's function
        return None
    return float(average[0])


def _follow_attribute(average: Any, gain: Callable[[], float]) -> None:
    name = next((n for n in DECAYS if _is_decay(getattr(average, n, None))), None)
    update = next((n for n in UPDATES if callable(getattr(average, n, None))), None)
    if name is None or update is None:
        return
    method = getattr(average, update)
    usual = [float(getattr(average, name))]

    @wraps(method)
    def followed(*args: Any, **options: Any) -> Any:
        now, worth = getattr(average, name), gain()
        if not _is_decay(now) or worth == 1.0 or abs(now - usual[0] ** worth) < 1e-12:
            return method(*args, **options)
        usual[0] = float(now)  # the script may have a schedule for it
        setattr(average, name, usual[0] ** worth)
        try:
            return method(*args, **options)
        finally:
            setattr(average, name, now)

    try:
        setattr(average, update, followed)
        setattr(average, _MARK, True)
    except AttributeError:
        logger.warning(NOT_FOLLOWED, type(average).__name__)


class OwnAverage:
    """Looks for an average inside of the model, as a momentum encoder: parameters that the script writes each step."""

    def __init__(self) -> None:
        self._since, self._writes = 0, dict[str, int]()

    def look(self, model: torch.nn.Module, steps: int) -> OwnAverage | None:
        """Warn of one, after so many optimizer steps; None where there is no more to look for."""
        now = {name: p._version for name, p in model.named_parameters() if not p.requires_grad}
        self._since, self._writes = (self._since, self._writes) if self._writes else (steps, now)
        if (passed := steps - self._since) < 3:
            return self if now else None
        written = [name for name, count in now.items() if count - self._writes.get(name, count) >= passed]
        if written:
            logger.warning(NOT_FOLLOWED, f"model ({written[0]})")
        return None


def _is_decay(value: object) -> bool:
    return isinstance(value, float) and 0.5 <= value < 1.0
