"""Learning-rate rules: the factor on the user's own schedule at a larger batch size, and how it is applied.

The factor is put on in a hook before `optimizer.step()` and taken off in one after it: between steps every
`param_group["lr"]` is what the user or the scheduler set, so that schedulers, checkpoints and logs stay theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pollux.errors import PolluxAgentError
from pollux.goodput import NoiseScale, gain
from pollux.noise.precondition import second_moment_name

Rule = Callable[[float, NoiseScale | None], float]
"""(scale M/M0, noise scale of a parameter group or None, at M0) -> factor on its learning rate."""


def adascale(scale: float, noise: NoiseScale | None) -> float:
    """AdaScale's gain r = (var + sqr) / (var / scale + sqr), 1 <= r <= scale (Johnson et al., 2020); for SGD."""
    return max(1.0, min(float(gain(noise, 1.0, scale)), scale)) if scale > 1.0 else 1.0


def square_root_adascale(scale: float, noise: NoiseScale | None) -> float:
    """The square root of AdaScale's gain: for Adam, AdamW, RMSProp, whose steps do not shrink with the noise."""
    return math.sqrt(adascale(scale, noise))


def linear(scale: float, noise: NoiseScale | None) -> float:
    """M / M0 (Goyal et al., 2017)."""
    return scale


def square_root(scale: float, noise: NoiseScale | None) -> float:
    """sqrt(M / M0) (Krizhevsky, 2014)."""
    return math.sqrt(scale)


def none(scale: float, noise: NoiseScale | None) -> float:
    """The user's learning rate at every batch size."""
    return 1.0


class Legw:
    """sqrt(M / M0), with a warm-up that is longer by M / M0: linear-epoch gradual warm-up (You et al., 2019).

    For a user's own schedule that warms up linearly over its first `warmup` steps of M0 examples (0: no warm-up). The
    factor stretches that ramp to `warmup * M / M0` scale-invariant steps, whatever sizes came before, and is the plain
    square root from there on.
    """

    def __init__(self, warmup: float) -> None:
        if not (math.isfinite(warmup) and warmup >= 0):
            raise PolluxAgentError(f"expected a warm-up of 0 steps or more for LEGW, got {warmup}")
        self.warmup = warmup
        self._steps: Callable[[], float] = lambda: 0.0

    def follow(self, steps: Callable[[], float]) -> None:
        """Learn where the training is: `steps` gives the scale-invariant steps made so far. Called by `attach`."""
        self._steps = steps

    def __call__(self, scale: float, noise: NoiseScale | None) -> float:
        made = max(self._steps(), 1e-9)
        if made >= self.warmup * scale:
            return math.sqrt(scale)
        wanted, given = made / (self.warmup * scale), min(made / self.warmup, 1.0)
        return math.sqrt(scale) * wanted / given


RULES: dict[str, Rule] = {
    "adascale": adascale,
    "sqrt-adascale": square_root_adascale,
    "linear": linear,
    "sqrt": square_root,
    "none": none,
}


class _Checked:
    """A user's own rule: one factor that is no finite, positive number would spoil the model for good."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def __call__(self, scale: float, noise: NoiseScale | None) -> float:
        factor = self.rule(scale, noise)
        try:
            good = math.isfinite(factor) and factor >= 0
        except TypeError:
            good = False
        if not good:
            raise PolluxAgentError(
                f"expected the learning-rate rule to give a finite factor of 0 or more, got {factor!r} at "
                f"{scale:g} times the initial batch size"
            )
        return float(factor)


def rule_for(name: str | Rule, optimizer: Optimizer) -> Rule:
    """The rule of that name; "auto": AdaScale, its square root for Adam-likes. Raises PolluxAgentError.

    "legw:500" is Legw(500). A function of the user's own is called with (scale, noise scale of the group or None) for
    each parameter group at each step above M0.
    """
    if callable(name):
        return name if isinstance(name, Legw) or name in RULES.values() else _Checked(name)
    if name == "auto":
        return adascale if second_moment_name(optimizer) is None else square_root_adascale
    if name.startswith("legw:"):
        try:
            return Legw(float(name.partition(":")[2]))
        except ValueError:
            raise PolluxAgentError(f"expected legw:STEPS, such as legw:500, got {name!r}") from None
    try:
        return RULES[name]
    except KeyError:
        known = ", ".join(["auto", *sorted(RULES), "legw:STEPS"])
        raise PolluxAgentError(
            f"expected a learning-rate rule of {known}, or a function; got {name!r}"
        ) from None


def follow(rule: Rule, steps: Callable[[], float]) -> None:
    """Give a rule that asks for it (by a method `follow`, as Legw has one) the scale-invariant steps made so far."""
    given = getattr(rule.rule if isinstance(rule, _Checked) else rule, "follow", None)
    if callable(given):
        given(steps)


class LearningRateScaler:
    """Multiplies each group's learning rate by its factor for the length of one `optimizer.step()`."""

    def __init__(self, optimizer: Optimizer, *, on_step: Callable[[], None]) -> None:
        self.factors: Sequence[float] = ()
        """Per parameter group; empty or 1 leaves it alone. Set between steps."""
        self.optimizer = optimizer
        self._on_step = on_step
        self._saved: list[tuple[dict[str, Any], Any]] = []
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._saved:
            self._restore()  # a step that raised never came to its post hook
        for group, factor in zip(optimizer.param_groups, self.factors, strict=False):
            if factor == 1.0 or "lr" not in group:
                continue
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                # A captured or compiled step holds on to the very tensor: changed in place.
                self._saved.append((group, rate.clone()))
                rate.mul_(factor)
            else:
                self._saved.append((group, rate))
                group["lr"] = rate * factor

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._saved:
            self._restore()
        self._on_step()

    def _restore(self) -> None:
        for group, rate in self._saved:
            if isinstance(rate, torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._saved.clear()

    def remove(self) -> None:
        """Take the hooks off the optimizer."""
        self._restore()
        for handle in self._handles:
            handle.remove()
