"""Keras's own callbacks over restarts and on several ranks.

What they have counted is in the checkpoint, and those that write do so on rank 0 alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import keras

COUNTED = ("best", "best_epoch", "best_weights", "wait", "stopped_epoch", "cooldown_counter")
"""Attributes in which Keras's callbacks keep what they have seen."""

WRITERS = (
    "ModelCheckpoint",
    "BackupAndRestore",
    "CSVLogger",
    "TensorBoard",
    "RemoteMonitor",
    "OrbaxCheckpoint",
)


class CallbackStates:
    """The state of all callbacks of one `fit`, as a part of the checkpoint."""

    def __init__(self, epochs: int) -> None:
        """`epochs`: of this `fit`."""
        self._callbacks: list[Any] = []
        self._epochs = epochs
        self._restored: list[dict[str, Any]] | None = None
        self._ended_of = 0

    @property
    def ended(self) -> bool:
        """An earlier start has ended this `fit`, by a callback."""
        return self._ended_of == self._epochs

    def end(self) -> None:
        """A callback ends this `fit`."""
        self._ended_of = self._epochs

    def take(self, first: bool) -> None:
        """Find the callbacks, from `on_train_begin`; leave those that write to the `first` rank."""
        listed = _callback_list()
        if listed is None:
            return
        self._callbacks = list(listed.callbacks)
        if not first:
            # In place: Keras goes through this list at this moment, and the first one, the agent's, has its turn.
            listed.callbacks[:] = [each for each in listed.callbacks if not _writes(each)]

    def put_back(self) -> None:
        """Give callbacks what they had counted, after their own `on_train_begin`."""
        restored, self._restored = self._restored, None
        for callback, state in zip(self._callbacks, restored or (), strict=False):
            if state["kind"] == type(callback).__name__:
                vars(callback).update(state["counted"])

    def state_dict(self) -> dict[str, Any]:
        states = self._restored
        if states is None:
            states = [{"kind": type(each).__name__, "counted": _counted(each)} for each in self._callbacks]
        return {"callbacks": states, "ended": self._ended_of}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restored, self._ended_of = state["callbacks"], state["ended"]


def _counted(callback: Any) -> dict[str, Any]:
    kept = (int, float, list, type(None))
    found = {name: getattr(callback, name) for name in COUNTED if name in vars(callback)}
    return {name: value if isinstance(value, kept) else float(value) for name, value in found.items()}


def _writes(callback: Any) -> bool:
    return any(isinstance(callback, getattr(keras.callbacks, name, ())) for name in WRITERS)


def _callback_list() -> Any:
    """Return the list that calls; None where Keras calls otherwise."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, keras.callbacks.CallbackList):
            return found
        frame = frame.f_back
    return None


def check_untouched(model: Any, optimizer: Any, params: Mapping[str, Any]) -> str:
    """Return what of a model or its `fit` the agent cannot do as Keras does; empty: nothing."""
    for name in ("train_step", "make_train_function", "fit"):
        if not getattr(type(model), name).__module__.startswith("keras."):
            return f"without a {name} of its own, which would not be called: put its loss into compute_loss"
    if getattr(model, "steps_per_execution", 1) != 1:
        return "compiled with steps_per_execution=1"
    if params.get("steps") is not None:
        return "in fit() without steps_per_epoch: an epoch is one pass through the data"
    for variable in model.trainable_variables:
        if getattr(variable, "constraint", None) is not None:
            return f"without constraints, which torch's optimizers do not apply: {variable.path} has one"
    excluded = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
    if any(getattr(optimizer, name, None) for name in excluded):
        return "whose optimizer decays all weights alike, without exclude_from_weight_decay"
    return ""
