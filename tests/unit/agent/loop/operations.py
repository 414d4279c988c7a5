"""Count the operations that torch dispatches, and the calls of the agent's own functions."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import pollux


class Counted(TorchDispatchMode):
    """Counts operations of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class OwnCalls:
    """Counts calls of the agent's functions, comprehensions and generators in this thread."""

    _AGENT = str(Path(pollux.__file__).parent)

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self._AGENT):
            self.names[frame.f_code.co_qualname] += 1

    def __enter__(self) -> OwnCalls:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
