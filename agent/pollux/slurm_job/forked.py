"""Where this process was forked. The package imports it first, so that a fork before `attach` is noted, too."""

from __future__ import annotations

import os
import sys
from types import FrameType

_frame: FrameType | None = None


def _note() -> None:
    global _frame  # noqa: PLW0603 - a fork inherits nothing else
    _frame = sys._getframe(1)


os.register_at_fork(after_in_child=_note)


def began_in(frame: FrameType) -> bool:
    """Tell whether this process was forked in the frame: it and those beyond are of what has started the process.

    A process that multiprocessing forked before this package was imported is known by multiprocessing's own frame.
    """
    return frame is _frame or (
        frame.f_code.co_name == "_launch" and frame.f_globals.get("__name__") == "multiprocessing.popen_fork"
    )
