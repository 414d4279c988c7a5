"""Where in its script a training is attached: the lines, and the variables of the loops around them.

A script that trains in a loop may leave out what it has done before (`if os.path.exists(result): continue`). Its loops'
variables then tell one training from the others, and their count does not.
"""

from __future__ import annotations

import dis
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Number
from pathlib import Path, PurePath
from types import FrameType
from typing import Any

_LIBRARIES = (
    str(Path(__file__).resolve().parents[1]),
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)
"""Folders whose code is no user's."""
_LONGEST = 64
_forked_in: FrameType | None = None
"""The frame in which this process was forked: it is of what has started the process."""


def _note_fork() -> None:
    global _forked_in  # noqa: PLW0603 - a fork inherits nothing else
    _forked_in = sys._getframe(1)


os.register_at_fork(after_in_child=_note_fork)


@dataclass(frozen=True)
class CallSite:
    """The user's lines that call `attach` now, outermost first."""

    lines: tuple[str, ...]
    """FILE:LINE."""
    code: int
    """A checksum of the functions around them: with another one, lines cannot be compared."""
    loops: str
    """The variables of the loops around them, as a part of a path: `fold=1,lr=0.1`; empty without loops."""


def call_site() -> CallSite:
    """Return where the script is."""
    frames = list(frames_of_the_user(sys._getframe(1)))[::-1]
    lines = tuple(f"{Path(f.f_code.co_filename).name}:{f.f_lineno}" for f in frames)
    codes = (f.f_code for f in frames)
    code = zlib.crc32(b"".join(c.co_code + c.co_linetable + str(c.co_firstlineno).encode() for c in codes))
    values: dict[str, Any] = {}
    for frame in frames:
        values |= {name: frame.f_locals[name] for name in _loop_variables(frame) if name in frame.f_locals}
    plain = {name: value for name, value in values.items() if _is_plain(value)}
    # Models and classes tell trainings apart where nothing plain does.
    shown = plain or {
        name: getattr(value, "__qualname__", type(value).__name__) for name, value in values.items()
    }
    return CallSite(lines, code, _as_path(",".join(f"{name}={value}" for name, value in shown.items())))


def frames_of_the_user(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        file = frame.f_code.co_filename
        if file == "<frozen runpy>" or frame is _forked_in:
            return  # beyond it is what has started the script, or this rank of it
        if not file.startswith(_LIBRARIES) and not file.startswith("<frozen"):
            yield frame
        frame = frame.f_back


def _loop_variables(frame: FrameType) -> Iterator[str]:
    """The variables of the `for` loops and comprehensions around a frame's place, outermost first."""
    instructions = list(dis.get_instructions(frame.f_code))
    for number, instruction in enumerate(instructions):
        # The argument is the loop's end.
        if instruction.opname == "FOR_ITER" and instruction.offset < frame.f_lasti < instruction.argval:
            yield from _stored(instructions[number + 1 :])


def _stored(instructions: list[dis.Instruction]) -> Iterator[str]:
    """The names that get a loop's value, or the parts of it."""
    left = 1
    for each in instructions:
        names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        if each.opname == "UNPACK_SEQUENCE":
            left += each.argval - 1
        elif each.opname.startswith("STORE_"):
            # Python 3.13 joins two instructions into one. The second one may be a load.
            stored = names[: each.opname.count("STORE")]
            left -= len(stored)
            yield from map(str, stored)
        elif each.opname not in ("CACHE", "NOP", "EXTENDED_ARG"):
            return
        if left <= 0:
            return


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bytes | Number | PurePath)


def _as_path(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._=,+-]", "_", text)
    return name if name == text and len(name) <= _LONGEST else f"{name[:40]}-{zlib.crc32(text.encode()):08x}"
