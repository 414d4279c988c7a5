"""Learning-rate rules: factors on the user's schedule at a larger batch.

A hook before `optimizer.step()` applies the factor, and a hook after it takes the factor off. Between steps every
`param_group["lr"]` is the value that the user or the scheduler set. Schedulers, checkpoints and logs therefore see no
factor.
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
from pollux.optimizers.families import Family

Rule = Callable[[float, NoiseScale | None], float]
"""(scale M/M0, noise scale of a parameter group or None, at M0) -> factor on its learning rate."""


def adascale(scale: float, noise: NoiseScale | None) -> float:
    """Return AdaScale's gain r (Johnson et al., 2020), for SGD.

    r = (var + sqr) / (var / scale + sqr), with 1 <= r <= scale.
    """
    return max(1.0, min(float(gain(noise, 1.0, scale)), scale)) if scale > 1.0 else 1.0


def square_root_adascale(scale: float, noise: NoiseScale | None) -> float:
    """Return the root of AdaScale's gain, for optimizers whose steps do not grow with the gradient, such as Adam."""
    return math.sqrt(adascale(scale, noise))


def automatic(scale: float, noise: NoiseScale | None) -> float:
    """Stand for the rule of each parameter group's optimizer family, which `factors` looks up."""
    raise AssertionError("the rule of a family was not looked up")


RULES: dict[str, Rule] = {
    "adascale": adascale,
    "sqrt-adascale": square_root_adascale,
    "none": lambda scale, noise: 1.0,
}
"""Others are functions of the user's: the linear rule is `lambda scale, noise: scale`."""


class _Checked:
    """A user's own rule, with each factor checked: one that is not finite would spoil the model permanently."""

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


def rule_for(name: str | Rule) -> Rule:
    """Return the rule of that name, or raise PolluxAgentError.

    "auto" is each optimizer family's own rule. A user's own function is called with (scale, noise scale of the group or
    None) for each parameter group at each step above M0.
    """
    if callable(name):
        return name if name in RULES.values() else _Checked(name)
    if name == "auto":
        return automatic
    try:
        return RULES[name]
    except KeyError:
        known = ", ".join(["auto", *sorted(RULES)])
        raise PolluxAgentError(
            f"expected a learning-rate rule of {known}, or a function; got {name!r}"
        ) from None


def name_of(rule: Rule) -> str:
    """Return the name that `rule_for` takes; a function has its own."""
    own = rule.rule if isinstance(rule, _Checked) else rule
    known = {known: name for name, known in RULES.items()} | {automatic: "auto"}
    return known.get(own, getattr(own, "__name__", type(own).__name__))


def follow(rule: Rule, steps: Callable[[], float]) -> None:
    """Give a rule with a method `follow` the function `steps`.

    `steps` returns the scale-invariant steps made so far.
    """
    given = getattr(rule.rule if isinstance(rule, _Checked) else rule, "follow", None)
    if callable(given):
        given(steps)


def factors(
    rule: Rule, families: Sequence[Family], scale: float, noise: Sequence[NoiseScale | None]
) -> list[float]:
    """Return the factor on each parameter group's learning rate.

    `noise` has shape [groups]. `families` is empty while the families are not known.
    """
    if rule is not automatic:
        return [rule(scale, group) for group in noise]
    rules = [RULES[family.rule] for family in families] or [RULES["none"]]
    # A group that the user adds later follows the last one's family.
    return [rules[min(i, len(rules) - 1)](scale, group) for i, group in enumerate(noise)]


class LearningRateScaler:
    """Multiply each group's learning rate by its factor for the length of one `optimizer.step()`."""

    def __init__(self, optimizer: Optimizer, *, on_step: Callable[[], None]) -> None:
        self.factors: Sequence[float] = ()
        """Per parameter group; empty or 1 leaves it alone. Set between steps."""
        self.optimizer = optimizer
        self.used: Sequence[float | torch.Tensor] = ()
        """The learning rates of the newest step, by parameter group; empty before the first one."""
        self._on_step = on_step
        self._saved: list[tuple[dict[str, Any], str, Any]] = []
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.factors or self._saved:
            self.apply()
        self.used = used = list[float | torch.Tensor]()
        for group in optimizer.param_groups:
            rate = group.get("lr", 0.0)
            used.append(rate.clone() if isinstance(rate, torch.Tensor) else rate)

    def apply(self) -> None:
        """Let the parameter groups have the values of the step, until `restore`."""
        self.restore()  # a step that raised did not reach its post hook
        optimizer = self.optimizer
        for group, factor in zip(optimizer.param_groups, self.factors, strict=False):
            rate = group.get("lr")
            if factor == 1.0 or rate is None:
                continue
            if isinstance(rate, torch.Tensor):
                # A captured or compiled step keeps this tensor, so change it in place.
                self._saved.append((group, "lr", rate.clone()))
                rate.mul_(factor)
            else:
                self._saved.append((group, "lr", rate))
                group["lr"] = rate * factor

    def rates(self) -> tuple[float, ...]:
        """Return the learning rates of the newest step, or of the first one."""
        if self.used:
            return tuple(map(float, self.used))
        groups = self.optimizer.param_groups
        factors = [*self.factors, *[1.0] * (len(groups) - len(self.factors))]
        return tuple(
            float(group.get("lr", 0.0)) * factor for group, factor in zip(groups, factors, strict=False)
        )

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._saved:
            self.restore()
        self._on_step()

    def restore(self) -> None:
        """Let the parameter groups have the values of the script again."""
        for group, key, value in self._saved:
            if isinstance(value, torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
        self._saved.clear()

    def remove(self) -> None:
        """Take the hooks off the optimizer."""
        self.restore()
        for handle in self._handles:
            handle.remove()
