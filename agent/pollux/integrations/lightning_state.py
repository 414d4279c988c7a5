"""Save, restore and hand over the state of Lightning's loops and callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class LoopState:
    """Lightning's own state as a part of the agent's checkpoints."""

    of_rank_0 = True
    """Callbacks of each rank measure their own times and losses; those of rank 0 are restored."""

    def __init__(self, trainer: Any, schedulers: list[Any]) -> None:
        self._trainer, self._schedulers = trainer, schedulers

    def averages(self) -> Iterator[object]:
        """Yield what may be a moving average of weights: callbacks, and what they hold."""
        for callback in self._trainer.callbacks:
            yield from (callback, *vars(callback).values())

    def state_dict(self) -> dict[str, Any]:
        callbacks = {callback.state_key: callback.state_dict() for callback in self._trainer.callbacks}
        return {
            "loops": self._trainer.fit_loop.state_dict(),
            "callbacks": {key: state for key, state in callbacks.items() if state},
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._trainer.fit_loop.load_state_dict(state["loops"])
        for callback in self._trainer.callbacks:
            own = state["callbacks"].get(callback.state_key)
            if own is None:
                continue
            if getattr(callback, "dirpath", None) and own.get("dirpath"):
                # A logger names another folder at each start. ModelCheckpoint would forget which models are the best,
                # and a joining rank would save at other steps than the ranks that remember them.
                callback.dirpath = own["dirpath"]
            callback.load_state_dict(own)
        for scheduler, own in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(own)


def go_on(loop: Any) -> None:
    """Let a loop and those within go on at the place of their counters, as the ranks do that handed these over.

    Lightning takes loaded counters for those of a checkpoint, and would start a validation or an epoch again.
    """
    loop.on_iteration_done()
    for inner in vars(loop).values():
        if hasattr(inner, "on_iteration_done"):
            go_on(inner)
