"""Recognise an optimizer's family by its state and options.

The noise scale and the learning rate follow from the family. Classes of the same name differ between libraries, and
the same algorithm has many names. The state says more: an optimizer that keeps `exp_avg_sq` beside `exp_avg` divides
by its root. A state tensor of the parameter's shape that no family accounts for means that the optimizer is not
understood. The agent then leaves the batch size as it is. torch's own optimizers are known, 8-bit AdamW and
schedule-free ones; `register` adds others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import SGD, Optimizer

from pollux.errors import PolluxAgentError
from pollux.optimizers import moments
from pollux.optimizers.together import Together

Reader = Callable[[moments.State, Tensor, moments.Group], Tensor | None]


class StepRule(NamedTuple):
    """How a second moment v becomes a preconditioner P. P = 1 / (sqrt(v) / corrected + eps)."""

    corrected: float
    """Root of the weight that v's averages have beyond their start at zero."""
    newest: float
    """Weight of the newest squared gradient in v."""
    eps: float


@dataclass(frozen=True)
class Family:
    """Optimizers that the noise scale and the learning rate treat alike."""

    name: str
    rule: str
    """The learning-rate rule that scaling="auto" takes."""
    preconditioner: str
    """P, in words."""
    source: str
    moment: Reader | None = None
    """Reads v; None: P is the identity."""
    lags: bool = False
    """Its v is an average over many steps, and lags behind the batch size."""
    understood: bool = True

    @property
    def preconditioned(self) -> bool:
        return self.moment is not None

    def step_rule(self, group: Mapping[str, Any], steps: int) -> StepRule:
        """Return how the group's v becomes P after `steps` optimizer steps."""
        if self is ADAM:
            beta2 = float(group["betas"][1])
            return StepRule((1.0 - beta2 ** max(steps, 1)) ** 0.5, 1.0 - beta2, float(group["eps"]))
        if self is RMSPROP:
            alpha = float(group["alpha"])
            return StepRule(1.0, 1.0 - alpha, float(group["eps"]))
        if self is ADAGRAD:
            return StepRule(1.0, 1.0 / max(steps, 1), float(group["eps"]))  # v is a sum
        # For the other families, v is the square of the whole divisor.
        if self is ADAFACTOR:
            decay = float(group["beta2_decay"])
            return StepRule(1.0, min(float(max(steps, 1)) ** decay, 1.0), 0.0)
        return StepRule(1.0, _newest(group), 0.0)

    def noise_share(self, group: Mapping[str, Any]) -> float:
        """Return how much of a gradient's squared noise sets a step's size.

        It is 1 for steps along a single gradient, and where the optimizer does not state its averages.
        """
        momentum = group.get("momentum")
        if self is MUON and isinstance(momentum, float):
            return momentum_share(momentum, nesterov=bool(group.get("nesterov", True)))
        return 1.0

    def clip(self, group: Mapping[str, Any]) -> float:
        """Return the root mean square of g / sqrt(v) above which steps are cut."""
        if self is not ADAFACTOR:
            return math.inf
        return max(float(group["d"]), 1.0)


def momentum_share(momentum: float, *, nesterov: bool) -> float:
    """The share of a gradient's squared noise in m, an average with `momentum`.

    With Nesterov's look-ahead: in momentum m + (1 - momentum) g, where m holds g already.
    """
    kept = momentum**2 if nesterov else momentum
    return (1.0 - kept) ** 2 + kept**2 * (1.0 - momentum) / (1.0 + momentum)


def _newest(group: Mapping[str, Any]) -> float:
    """Return the newest gradient's weight in v. It is 1/1000, as in Adam, if the optimizer states no constant."""
    if "rho" in group:
        return 1.0 - float(group["rho"])
    betas = group.get("betas")
    return 1.0 - float(betas[1]) if betas is not None and len(betas) > 1 and betas[1] else 1e-3


_SQRT = "sqrt-adascale"
_ADAM_SOURCE = "Malladi et al., 2022 (square root); Pollux 3.1 (P)"

SGD_LIKE = Family("SGD", "adascale", "identity", "Johnson et al., 2020")
ADAM = Family("Adam", _SQRT, "1 / (sqrt(v) + eps)", _ADAM_SOURCE, moments.adam, lags=True)
RMSPROP = Family("RMSprop", _SQRT, "1 / (sqrt(v) + eps)", _ADAM_SOURCE, moments.rmsprop, lags=True)
ADAGRAD = Family(
    "Adagrad", _SQRT, "1 / (sqrt(sum g^2) + eps)", "Malladi et al., 2022, for RMSprop", moments.adagrad
)
ADADELTA = Family(
    "Adadelta",
    _SQRT,
    "sqrt(mean step^2 + eps) / sqrt(v + eps)",
    "Zeiler, 2012 (P); as RMSprop",
    moments.adadelta,
)
ADAMAX = Family(
    "Adamax", _SQRT, "1 / u, u the infinity norm", "Kingma and Ba, 2015, 7.1", moments.adamax, lags=True
)
ADAFACTOR = Family(
    "Adafactor",
    _SQRT,
    "RMS(w) / sqrt(row x col)",
    "Shazeer and Stern, 2018 (P); as Adam",
    moments.adafactor,
    lags=True,
)
MUON = Family(
    "Muon",
    _SQRT,
    "1 / RMS(momentum), per tensor (approximate)",
    "steps of fixed spectral norm (Jordan, 2024); corrected for the momentum",
    moments.per_tensor,
)
UNKNOWN = Family("unknown", "none", "not measured", "", understood=False)
CHOSEN = Family("chosen by the user", "none", "identity", "")
"""Not understood, but the script names a rule: gradients are measured as they are."""

_SGD_OPTIONS = {"lr", "momentum", "dampening", "weight_decay", "nesterov"}
_ADAM_STATE = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "z"}
"""Adam's, AMSGrad's, and schedule-free Adam's."""
registered: dict[type[Optimizer], Family] = {}
_IMPLEMENTATION = {"maximize", "foreach", "differentiable", "fused", "capturable"}
_LAMB_OPTIONS = {"trust_clip", "always_adapt", "use_nvlamb", "grad_averaging"}


def register(
    optimizer: type[Optimizer], rule: str, second_moment: Reader | None = None, *, lags: bool = False
) -> None:
    """Tell the agent how an optimizer of another library steps. Call it before `attach`.

    Args:
        optimizer: the class; its subclasses count, too.
        rule: of the learning rate: "sqrt-adascale" if the size of the steps does not depend on the size of the
            gradient, as Adam's; "adascale" if they are proportional to it, as SGD's.
        second_moment: returns, from a parameter's state, the parameter and its group, v of the parameter's shape such
            that a step divides an element of the gradient by about sqrt(v); None before the first step. Without it,
            steps are along the gradient. It must not write, nor wait for the device.
        lags: v is an average over many steps.
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise PolluxAgentError(f"expected a class of torch.optim.Optimizer, got {optimizer!r}")
    if rule not in ("adascale", "sqrt-adascale"):
        raise PolluxAgentError(f"expected rule as 'adascale' or 'sqrt-adascale', got {rule!r}")
    registered[optimizer] = Family(optimizer.__name__, rule, "registered", "", second_moment, lags=lags)


def recognise(optimizer: Optimizer, *, stepped: bool) -> tuple[Family, ...] | None:
    """Return the family of each parameter group.

    Return None while no state tells the family. `stepped`: the optimizer has made a step, so that a state which is
    empty now stays empty.
    """
    if isinstance(optimizer, Together):
        each = [recognise(part, stepped=stepped) for part in optimizer.parts]
        return tuple(family for found in each if found for family in found) if all(each) else None
    known = next((registered[kind] for kind in type(optimizer).__mro__ if kind in registered), None)
    if known is not None:
        tells = known.moment is None or stepped or any(optimizer.state.values())
        return (known,) * len(optimizer.param_groups) if tells else None
    if type(optimizer) is SGD:
        return (SGD_LIKE,) * len(optimizer.param_groups)
    found = [_of_group(optimizer, group) for group in optimizer.param_groups]
    known = next((family for family in found if family is not None), None)
    if known is None:
        if not stepped:
            return None
        known = SGD_LIKE if _sgd_options(optimizer) and not any(optimizer.state.values()) else UNKNOWN
    # A group whose parameters had no gradient so far gets the family of the others.
    return tuple(family or known for family in found)


def _of_group(optimizer: Optimizer, group: Mapping[str, Any]) -> Family | None:
    """Return the one family of all of a group's parameters with a state. Return None if no parameter has a state."""
    stepped = [param for param in group["params"] if optimizer.state.get(param)]
    # For a parameter with one element, every number in the state has the parameter's shape.
    large = [param for param in stepped if param.numel() > 1] or stepped
    found = {_of_param(optimizer, group, param, optimizer.state[param]) for param in large}
    if len(found) > 1:
        return UNKNOWN
    family = next(iter(found), None)
    own_rate = not isinstance(group.get("lr"), float | int | Tensor) or group.get("relative_step")
    return UNKNOWN if family is not None and own_rate else family


def _of_param(
    optimizer: Optimizer, group: Mapping[str, Any], param: Tensor, state: Mapping[str, Any]
) -> Family:
    if "state1" in state:
        # bitsandbytes calls its states state1 and state2, whatever they mean.
        return ADAM if getattr(optimizer, "optimizer_name", "") == "adam" else UNKNOWN
    like_param = {
        key
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == param.shape and (param.dim() or key != "step")
    }
    options = set(optimizer.defaults) | set(group)
    if "beta2_decay" in options:
        return UNKNOWN if like_param - {"variance"} else ADAFACTOR
    if any(_more(value) for key, value in state.items() if key not in like_param):
        return UNKNOWN  # such as SOAP's bases beside Adam's moments
    if "exp_avg_sq" in like_param and {"betas", "eps"} <= options:
        if like_param - _ADAM_STATE or "trust_ratio" in state or options & _LAMB_OPTIONS:
            return UNKNOWN
        # RAdam has Adam's state and options. Its warm-up counts 2 / (1 - beta2) steps, however large the batch is.
        return UNKNOWN if "radam" in type(optimizer).__name__.lower() else ADAM
    return _by_exact_state(optimizer, group, like_param, state)


def _by_exact_state(
    optimizer: Optimizer, group: Mapping[str, Any], like_param: set[str], state: Mapping[str, Any]
) -> Family:
    options = set(optimizer.defaults) | set(group)
    if like_param == {"exp_avg", "exp_inf"}:
        return ADAMAX
    if like_param == {"square_avg", "acc_delta"}:
        return ADADELTA
    if "square_avg" in like_param and not like_param - {"square_avg", "momentum_buffer", "grad_avg"}:
        return RMSPROP
    if like_param == {"sum"} and "lr_decay" in options:
        return ADAGRAD
    if (like_param == {"ax"} and "eta" in state) or (like_param == {"z"} and "weight_lr_power" in options):
        return SGD_LIKE  # averaged SGD; schedule-free SGD: both step in proportion to the gradient
    if like_param == {"momentum_buffer"}:
        if "ns_steps" in options:
            return MUON
        if _sgd_options(optimizer):
            return SGD_LIKE
    return UNKNOWN


def _more(value: object) -> bool:
    """Tell whether a part of a state holds more than a number."""
    return value.numel() > 1 if isinstance(value, Tensor) else isinstance(value, list | tuple | dict)


def _sgd_options(optimizer: Optimizer) -> bool:
    """Tell whether the options are exactly those of SGD. LARS and signSGD keep the same state as SGD."""
    options = set(optimizer.defaults) - _IMPLEMENTATION
    return options == _SGD_OPTIONS


def not_understood(optimizer: Optimizer) -> str:
    """The one warning about an optimizer that is not understood."""
    if isinstance(optimizer, Together):
        each = ((part, recognise(part, stepped=True) or ()) for part in optimizer.parts)
        optimizer = next((part for part, found in each if UNKNOWN in found), optimizer)
    states = (state for state in optimizer.state.values() if state)
    keys = ", ".join(sorted(map(str, next(states, {})))) or "none"
    return (
        f"{type(optimizer).__name__} is not an optimizer that the agent understands (its state: {keys}), so the batch "
        "size stays as it is. Name a learning-rate rule to let it change: attach(..., scaling='sqrt-adascale') if the "
        "size of its steps does not depend on the size of the gradient, as Adam's, or scaling='adascale' if its steps "
        "are proportional to the gradient, as SGD's"
    )
