"""Several optimizers of one model, as one: Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pollux.errors import LoopMistake, PolluxAgentError


class Together(Optimizer):
    """Step several optimizers at once.

    Its parameter groups are theirs, in their order: the same dictionaries, so a schedule of one of them acts as before.
    While they are together, each is stepped by this one alone. Raises PolluxAgentError where two have a parameter in
    common.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts: list[Optimizer] = []
        self._steps = False
        groups = [group for part in parts for group in part.param_groups]
        seen: set[Tensor] = set()
        for param in (p for group in groups for p in group["params"]):
            if param in seen:
                raise PolluxAgentError(
                    "expected optimizers of different parameters, got two that have one in common: each would step it"
                )
            seen.add(param)
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.parts = list(parts)
        self._hooks = [part.register_step_pre_hook(self._before_part) for part in parts]
        for part in parts:
            part.zero_grad = lambda set_to_none=True: self.zero_grad(set_to_none)  # type: ignore[method-assign]
            part.add_param_group = self.add_param_group  # type: ignore[method-assign]

    @property
    def kind(self) -> str:
        """Their names, for what is compared after a restart."""
        return " + ".join(type(part).__name__ for part in self.parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Nothing: they are the parts'."""

    @property
    def state(self) -> Any:
        return _States(self.parts)

    @state.setter
    def state(self, state: Any) -> None:
        """Nothing: it is the parts'."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step each of them."""
        if closure is not None:
            raise LoopMistake("expected no closure for several optimizers: each would make a pass of its own")
        self._steps = True
        try:
            for part in self.parts:
                part.step()
        finally:
            self._steps = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.parts:
            raise LoopMistake(
                "add_param_group was called for one of several optimizers: make all groups before `attach`, and freeze "
                "their parameters by requires_grad_(False) until they are trained"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        groups = list(state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"{len(groups)} parameter groups were saved, and there are {len(self.param_groups)}"
            )
        for part in self.parts:
            own, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
            numbers = {number for group in own for number in group["params"]}
            state = {number: value for number, value in state_dict["state"].items() if number in numbers}
            part.load_state_dict({"state": state, "param_groups": own})

    def part_ways(self) -> None:
        """Let each be stepped alone again."""
        for hook in self._hooks:
            hook.remove()
        for part in self.parts:
            for name in ("zero_grad", "add_param_group"):
                part.__dict__.pop(name, None)

    def _before_part(self, part: Optimizer, args: Any, options: Any) -> None:
        if not self._steps:
            raise LoopMistake(
                f"{type(part).__name__}.step() was called for one of several optimizers: job.step(...) steps all of "
                "them; in the explicit form call job.optimizer.step() in place of each one's"
            )


class _States(Mapping[Tensor, Any]):
    """The state of each parameter, in the optimizer that has it."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = parts

    def __getitem__(self, param: Tensor) -> Any:
        for part in self._parts:
            if param in part.state:
                return part.state[param]
        raise KeyError(param)

    def __iter__(self) -> Iterator[Tensor]:
        for part in self._parts:
            yield from part.state

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)


def one_of(optimizers: Sequence[Optimizer]) -> Optimizer:
    """Return one optimizer that steps all of the list."""
    return optimizers[0] if len(optimizers) == 1 else Together(optimizers)
