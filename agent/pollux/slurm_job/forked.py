"""Where this process was forked. The package imports it first, so that a fork before `attach` is noted, too."""

from __future__ import annotations

import os
import sys
from types import FrameType

_frames: list[FrameType] = []
os.register_at_fork(after_in_child=lambda: _frames.append(sys._getframe(1)))


def began_in(frame: FrameType) -> bool:
    """Tell whether this process was forked in the frame: it and those beyond are of what has started the process.

    A process that multiprocessing forked before this package was imported is known by multiprocessing's own frame.
    """
    library = frame.f_globals.get("__name__") == "multiprocessing.popen_fork"
    return frame in _frames or (library and frame.f_code.co_name == "_launch")
