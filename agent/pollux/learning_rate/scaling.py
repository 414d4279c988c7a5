"""Learning-rate rules: factors on the user's schedule at a larger batch.

A hook before `optimizer.step()` applies the factor, and a hook after it takes the factor off. Between steps every
`param_group["lr"]` is the value that the user or the scheduler set. Schedulers, checkpoints and logs therefore see no
factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pollux.errors import PolluxAgentError
from pollux.goodput import NoiseScale, gain
from pollux.optimizers.families import SGD_LIKE, Family, decoupled_decay

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


def sde(scale: float, noise: NoiseScale | None) -> float:
    """Return the square root of the gain k, for Adam and RMSprop.

    `hyperparameters` scales betas, eps and weight decay along with k. The rule follows from the optimizers' stochastic
    differential equations (Malladi et al., 2022, definitions 5.2 and 5.3). The paper's rule takes the ratio of the
    batches; this one takes AdaScale's gain. Both agree while noise dominates.
    """
    return square_root_adascale(scale, noise)


class Legw:
    """Factor sqrt(M / M0), with a warm-up that is longer by M / M0.

    This is linear-epoch gradual warm-up (You et al., 2019), for a user's own schedule that warms up linearly over its
    first `warmup` steps of M0 examples (0: no warm-up). The factor stretches that ramp to `warmup * M / M0`
    scale-invariant steps, whatever batch sizes came before. After the ramp the factor is the plain square root.
    """

    def __init__(self, warmup: float) -> None:
        if not (math.isfinite(warmup) and warmup >= 0):
            raise PolluxAgentError(f"expected a warm-up of 0 steps or more for LEGW, got {warmup}")
        self.warmup = warmup
        self._steps: Callable[[], float] = lambda: 0.0

    def follow(self, steps: Callable[[], float]) -> None:
        """Store `steps`, which returns the scale-invariant steps made so far. `attach` calls this."""
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
    "sde": sde,
    "linear": lambda scale, noise: scale,
    "sqrt": lambda scale, noise: math.sqrt(scale),
    "none": lambda scale, noise: 1.0,
}
"""Linear: Goyal et al., 2017; square root: Krizhevsky, 2014."""


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

    "auto" is each optimizer family's own rule, and "legw:500" is Legw(500). A user's own function is called with
    (scale, noise scale of the group or None) for each parameter group at each step above M0.
    """
    if callable(name):
        return name if isinstance(name, Legw) or name in RULES.values() else _Checked(name)
    if name == "auto":
        return automatic
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


def name_of(rule: Rule) -> str:
    """Return the name that `rule_for` takes; a function has its own."""
    if isinstance(rule, Legw):
        return f"legw:{rule.warmup:g}"
    own = rule.rule if isinstance(rule, _Checked) else rule
    known = {known: name for name, known in RULES.items()} | {automatic: "auto"}
    return known.get(own, getattr(own, "__name__", type(own).__name__))


def follow(rule: Rule, steps: Callable[[], float]) -> None:
    """Give a rule with a method `follow` the function `steps`.

    `steps` returns the scale-invariant steps made so far. Legw has such a method.
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
    # A group that the user adds later follows the last one's family, as in `hyperparameters`.
    return [rules[min(i, len(rules) - 1)](scale, group) for i, group in enumerate(noise)]


def hyperparameters(
    rule: Rule,
    optimizer: Optimizer,
    families: Sequence[Family],
    scale: float,
    noise: Sequence[NoiseScale | None],
) -> list[dict[str, Any]]:
    """Return what the rule "sde" changes in each group, for one step.

    `rule` is "sde", or the automatic one for families whose rule is "sde".

    The learning rate is not among these options. With the gain k, beta becomes 1 - k (1 - beta), at least 0; eps
    becomes eps / sqrt(k). Decoupled weight decay is multiplied by sqrt(k). With the learning rate's sqrt(k) the weights
    then decay by the same share per unit of progress (Wang and Aitchison, 2024). Only families that the rule was
    derived for are changed.
    """
    found: list[dict[str, Any]] = []
    for i, (group, at) in enumerate(zip(optimizer.param_groups, noise, strict=False)):
        family = families[min(i, len(families) - 1)] if families else SGD_LIKE
        k = adascale(scale, at)
        changed: dict[str, Any] = {}
        applies = rule is sde or (rule is automatic and family.rule == "sde")
        if applies and family.decays and k > 1.0:
            if "betas" in group:
                changed["betas"] = tuple(_shorter(beta, k) for beta in group["betas"])
            if "alpha" in group and "betas" not in group:
                changed["alpha"] = _shorter(group["alpha"], k)
            if isinstance(group.get("eps"), float | int):
                changed["eps"] = group["eps"] / math.sqrt(k)
            if decoupled_decay(optimizer, group) and isinstance(group.get("weight_decay"), float | int):
                changed["weight_decay"] = group["weight_decay"] * math.sqrt(k)
        found.append(changed)
    return found


def _shorter(beta: Any, k: float) -> Any:
    """Return the decay of an average for steps that are worth `k`. 0 (no average) and tensors stay as they are."""
    return max(1.0 - k * (1.0 - beta), 0.0) if isinstance(beta, float) and beta > 0.0 else beta


class LearningRateScaler:
    """Multiply each group's learning rate by its factor for the length of one `optimizer.step()`."""

    def __init__(self, optimizer: Optimizer, *, on_step: Callable[[], None]) -> None:
        self.factors: Sequence[float] = ()
        """Per parameter group; empty or 1 leaves it alone. Set between steps."""
        self.others: Sequence[Mapping[str, Any]] = ()
        """Other options of each parameter group during the step (scaling="sde")."""
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
        self.apply()
        rates = [group.get("lr", 0.0) for group in optimizer.param_groups]
        self.used = [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]

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
        for group, others in zip(optimizer.param_groups, self.others, strict=False):
            for key, value in others.items():
                self._saved.append((group, key, group[key]))
                group[key] = value

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
