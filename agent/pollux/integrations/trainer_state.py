"""Save and restore the state of Hugging Face's Trainer and callbacks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

_KEPT = (
    "global_step",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
    "total_flos",
    "num_input_tokens_seen",
)
"""The fields of Trainer's state that a restart restores. The other fields follow from Trainer's arguments."""


class TrainerState:
    """Trainer's state as a part of the agent's checkpoints.

    It includes the state of callbacks, such as the patience of EarlyStoppingCallback: a joining rank without it would
    train on after the other ranks have stopped.
    """

    of_rank_0 = True
    """Each rank logs its own losses; those of rank 0 are restored."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def averages(self) -> Iterator[object]:
        """Yield what may be a moving average of weights: callbacks, and what they hold."""
        for callback in self._trainer.callback_handler.callbacks:
            yield from (callback, *vars(callback).values())

    def state_dict(self) -> dict[str, str]:
        state = asdict(self._trainer.state)
        callbacks = {name: callback.state()["attributes"] for name, callback in self._callbacks().items()}
        kept = {name: state[name] for name in _KEPT if name in state}
        return {"trainer": json.dumps(kept), "callbacks": json.dumps(callbacks)}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        for name, value in json.loads(state["trainer"]).items():
            setattr(self._trainer.state, name, value)
        kept = json.loads(state.get("callbacks", "{}"))
        for name, callback in self._callbacks().items():
            for attribute, value in kept.get(name, {}).items():
                setattr(callback, attribute, value)

    def _callbacks(self) -> dict[str, Any]:
        """Callbacks with a state, by class and place among its instances."""
        found: dict[str, Any] = {}
        for callback in self._trainer.callback_handler.callbacks:
            if callable(getattr(callback, "state", None)):
                kind = type(callback).__name__
                found[f"{kind} {sum(name.split()[0] == kind for name in found)}"] = callback
        return found
