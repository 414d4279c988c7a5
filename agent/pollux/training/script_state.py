"""What the script itself wants to have in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from pollux.errors import PolluxAgentError

METHODS = ("state_dict", "load_state_dict")


def is_stateful(value: object) -> bool:
    """Whether an object has both methods, as torch's modules have them."""
    return all(callable(getattr(value, method, None)) for method in METHODS)


class ScriptState:
    """A dict of the script, as a part of the checkpoint: objects with both methods, and plain values."""

    def __init__(self, values: MutableMapping[str, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        return {
            name: value.state_dict() if is_stateful(value) else value for name, value in self._values.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore objects in place, and put plain values into the dict.

        What the script no longer names is left out, and what the checkpoint does not hold stays. Raises
        PolluxAgentError where one has an object and the other a plain value.
        """
        for name, found in state.items():
            value = self._values.get(name)
            if is_stateful(value):
                if not isinstance(found, Mapping):
                    raise PolluxAgentError(
                        f"expected the checkpoint's state of {name!r} to be one of a {type(value).__name__}, "
                        f"got {type(found).__name__}: give state= as the script that wrote it did"
                    )
                self._values[name].load_state_dict(found)
            elif name in self._values:
                self._values[name] = found

    @property
    def names(self) -> set[str]:
        """What the script names now."""
        return set(self._values)


class ScriptSnapshot:
    """A part with its state as it was when this was made."""

    def __init__(self, part: Any) -> None:
        self._state = part.state_dict()
        self.of_rank_0 = bool(getattr(part, "of_rank_0", False))

    def state_dict(self) -> Any:
        return self._state
