"""What the script gave to `attach`, kept in its checkpoints.

A restart may run an edited script, or one that thaws layers and adds parameter groups as it trains. Optimizers and
schedulers restore their settings with their state, without a word. The record says which of the script's values that
changes, restores added groups and thawed layers, and names the first difference that cannot be restored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch.optim import Optimizer

from pollux.optimizers.together import Together
from pollux.training.tracked_run import present

COMPILED = "_orig_mod."
"""torch.compile puts this into the names of a module's parameters."""

CHANGED = (
    "a restart of this script could not read its checkpoints. Make the change before `attach` in every start "
    "(prune.identity keeps a place for a mask that comes later), or train on in a training of its own: job.close(), "
    "then attach again"
)
"""Of a model whose state has other names or shapes than at `attach`."""

_OTHER_NAMES = ("params", "param_names", "initial_lr", "base_lrs", "_last_lr")
"""Entries of a group or scheduler that are no settings, or are there under another name."""


def plain_name(name: str) -> str:
    """Return a parameter's name as it is without torch.compile."""
    return name.replace(COMPILED, "")


class PlainNames:
    """A module's state, under its names without torch.compile."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        return {plain_name(name): value for name, value in self._module.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = {plain_name(name): name for name in self._module.state_dict()}
        self._module.load_state_dict({names.get(name, name): value for name, value in state.items()})


class ScriptRecord:
    """The settings, groups and trained parameters of one model's script.

    Made before the checkpoint is restored, and restored before its optimizer.
    """

    def __init__(self, module: torch.nn.Module, optimizer: Optimizer, scheduler: Any | None) -> None:
        self._module, self._optimizer, self._scheduler = module, optimizer, scheduler
        self._settings = dict(_settings(optimizer, scheduler))
        self._structure = self._now()
        self.restored: list[str] = []
        """The script's values that the checkpoint's replace, in words."""
        self.edited: list[str] = []
        """Of these, the settings of the optimizer and the schedule."""
        self.origin: dict[str, Any] = {}
        """Where and how the training began (see `same_training`)."""
        self.origin_restored: dict[str, Any] = {}
        """The checkpoint's; empty without one."""
        self.tracked: dict[str, str] = {}
        """Of the checkpoint: the runs of trackers (see `tracked_run`)."""

    def state_dict(self) -> dict[str, str]:
        names = {p: plain_name(name) for name, p in self._module.named_parameters()}
        record = {
            "optimizer": _kind(self._optimizer),
            "scheduler": None if self._scheduler is None else type(self._scheduler).__name__,
            "settings": self._settings,
            "groups": [[names.get(p, "") for p in group["params"]] for group in self._optimizer.param_groups],
            "frozen": [name for p, name in names.items() if not p.requires_grad],
            "shapes": self._shapes(),
            "changed": self.changed(),
            "origin": self.origin,
            "tracked": present() or self.tracked,
        }
        return {"json": json.dumps(record)}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Restore groups and frozen layers.

        Raises ValueError for another optimizer or scheduler, or for other parameters in its groups.
        """
        record = json.loads(state["json"])
        for kind, own in (("optimizer", self._optimizer), ("scheduler", self._scheduler)):
            now = None if own is None else _kind(own)
            if now is not None and record[kind] not in (None, now):
                raise ValueError(f"its {kind} was {record[kind]}, and is {now} now")
        params = {plain_name(name): p for name, p in self._module.named_parameters()}
        self._restore_groups(record["groups"], params)
        frozen = set(record["frozen"])
        # A GAN's critic may be frozen as a whole at the end of a step: its script thaws it before the critic's pass.
        for name, param in params.items() if not frozen.issuperset(params) else ():
            if param.requires_grad is (name in frozen):
                param.requires_grad_(name not in frozen)
                self.restored.append(f"{name} {'frozen' if name in frozen else 'trained'}")
        for name, saved in record["settings"].items():
            if name not in self._settings or self._settings[name] == saved:
                continue
            self.edited.append(f"{name} {saved} (the script has {self._settings[name]})")
            self._settings[name] = saved
        self.restored += self.edited
        self.origin_restored = record.get("origin", {})
        self.tracked = record.get("tracked", {})

    def difference(self, state: Mapping[str, Any], part: str) -> str:
        """Return the first parameter that a checkpoint has otherwise; empty: none."""
        try:
            theirs = json.loads(state[part]["json"])["shapes"]
        except (KeyError, TypeError, ValueError):
            return ""
        for mine, other in zip_longest(self._shapes(), theirs):
            if mine != other:
                return f"The first difference: {_in_words(mine)} in the script, {_in_words(other)} in the checkpoint. "
        return ""

    def changed(self) -> str:
        """Say what the model's state has otherwise than at `attach`; empty: nothing.

        A restart of the script could not read such a state: its model is the one at `attach` again.
        """
        before, now = self._structure, self._now()
        if before == now:
            return ""
        for name in (*before, *now):
            if before.get(name) != now.get(name):
                return f"{name} is {_shaped(now.get(name))} and was {_shaped(before.get(name))}"
        return ""

    def _now(self) -> dict[str, list[int]]:
        """The names and shapes of the model's state."""
        state = self._module.state_dict()
        return {plain_name(name): list(getattr(value, "shape", ())) for name, value in state.items()}

    def _shapes(self) -> list[list[Any]]:
        return [[plain_name(name), list(p.shape)] for name, p in self._module.named_parameters()]

    def _restore_groups(self, saved: list[list[str]], params: Mapping[str, torch.Tensor]) -> None:
        groups = self._optimizer.param_groups
        names = {p: name for name, p in params.items()}
        for number, (group, wanted) in enumerate(zip(groups, saved, strict=False)):
            found = [names.get(p, "") for p in group["params"]]
            for mine, other in zip_longest(found, wanted):
                if mine != other:
                    raise ValueError(
                        f"parameter group {number} of the optimizer has {mine or 'no parameter'} where it had "
                        f"{other or 'none'}"
                    )
        first = len(groups)
        for wanted in saved[first:]:
            missing = next((name for name in wanted if name not in params), None)
            if missing is not None:
                raise ValueError(
                    f"a parameter group that the script had added holds {missing!r}, which is gone"
                )
            self._optimizer.add_param_group({"params": [params[name] for name in wanted]})
            number = len(groups) - 1
            self.restored.append(f"parameter group {number} added (the script's add_param_group is ignored)")
        if restored := groups[first:]:
            self._ignore_additions(restored)

    def _ignore_additions(self, restored: list[dict[str, Any]]) -> None:
        """Ignore one `add_param_group` of the script for each restored group.

        A restart goes again through the beginning of the epoch in which the script added the group.
        """
        add = self._optimizer.add_param_group
        left = [set(map(id, group["params"])) for group in restored]

        def guarded(param_group: dict[str, Any]) -> None:
            params = param_group["params"]
            if isinstance(params, Iterator):
                params = param_group["params"] = list(params)
            listed = [params] if isinstance(params, torch.Tensor) else params
            own = {id(p[1] if isinstance(p, tuple) else p) for p in listed}  # a tuple: a name and a parameter
            if own in left:
                left.remove(own)
            else:
                add(param_group)

        # On this optimizer alone, until `TrainedModel.close`.
        self._optimizer.add_param_group = guarded  # type: ignore[method-assign]


def _kind(part: Any) -> str:
    return part.kind if isinstance(part, Together) else type(part).__name__


def _settings(optimizer: Optimizer, scheduler: Any | None) -> Iterator[tuple[str, Any]]:
    """Yield the script's settings by name, as JSON has them."""
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name not in _OTHER_NAMES:
                plain = _plain(group.get("initial_lr", value) if name == "lr" else value)
                yield from _named(f"{name} of parameter group {number}", plain)
    state = {} if scheduler is None else scheduler.state_dict()
    for name, value in state.items() if isinstance(state, dict) else ():
        if name not in _OTHER_NAMES:
            yield from _named(f"{name} of the scheduler", value)


def _named(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    try:
        yield name, json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return  # an object of the script's


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _shaped(shape: list[int] | None) -> str:
    return "not there" if shape is None else f"of shape {shape}"


def _in_words(shape: list[Any] | None) -> str:
    return "no further parameter" if shape is None else f"{shape[0]} of shape {shape[1]}"


def advice(part: str, state: Mapping[str, Any]) -> str:
    """Return what to do about a checkpoint's `part` that does not fit the script."""
    prefix = part[: part.rfind(".") + 1]
    try:
        changed = json.loads(state[f"{prefix}script"]["json"]).get("changed", "")
    except (KeyError, TypeError, ValueError):
        changed = ""
    if changed:
        return f"The script changed its model after `attach` ({changed}): {CHANGED}"
    return "Restore the script that wrote it"
