"""Where in its script a training is attached: the calls that lead there, and the variables of the loops around them.

A script may leave out what it has done before (`if os.path.exists(result): continue`). The calls and the loops'
variables then tell one training from the others, and their count does not. Where another library decides what is
trained next, its word counts like a loop's variable: the trial of Optuna, the run of a W&B sweep or of Hydra's.
"""

from __future__ import annotations

import dis
import linecache
import os
import platform
import re
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from inspect import CO_VARARGS, CO_VARKEYWORDS
from itertools import islice
from numbers import Number
from pathlib import Path, PurePath
from types import FrameType
from typing import Any

from pollux.slurm_job.forked import began_in

_LIBRARIES = (
    str(Path(__file__).resolve().parents[1]),
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")},
)
"""Folders whose code is no user's."""
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")
"""So are these, wherever they lie: modules of a cluster and users' own installations are not below the interpreter."""
RANK = "POLLUX_RANK_PROCESS"
"""The process of a rank, for those that its script starts."""
_LONGEST = 64
_MOST = 200
"""Arguments of one call that are looked at."""
_NODE = rf"(?<![^\W_]){re.escape(platform.node() or '-')}(?![^\W_])"
_OF_A_START = re.compile(
    rf"(?<![\w.:-])[\w.:-]*\d{{4}}[\w.:-]*|0x[0-9a-f]+|tmp\w+|\d\d[-_:.]\d\d[-_:.]\d\d|{_NODE}"
)
"""What differs between two starts of one training: drawn names, addresses, temporary files, times, the node's name.
Each word is looked at once: a genome may be an argument."""
_FOLLOWS_THE_START = re.compile(
    r"(^|[_.])(resumed?|restarts?|restored?|attempts?|rank|world|device|port|time(stamp)?|date)([_.]|$)"
)
"""Names of arguments that differ between two starts of one training."""


@dataclass(frozen=True)
class CallSite:
    """The user's lines that call `attach` now, outermost first."""

    lines: tuple[str, ...]
    """FILE:LINE."""
    code: int
    """A checksum of the functions around them: with another one, lines cannot be compared."""
    place: int
    """A checksum of the instructions in them that call."""
    text: int
    """A checksum of the lines' text, which an edit elsewhere does not change; 0: there is none."""
    loops: str
    """The variables of the loops around them, as a part of a path: `fold=1,lr=0.1`; empty without loops."""
    arguments: Mapping[str, str] = field(default_factory=dict, compare=False)
    """What the calls are given, by FUNCTION.NAME: digests of plain values, those of numbers begin with `#`."""


def call_site() -> CallSite:
    """Return where the script is."""
    frames = list(frames_of_the_user(sys._getframe(1)))[::-1]
    lines = tuple(f"{Path(f.f_code.co_filename).name}:{f.f_lineno}" for f in frames)
    codes = (f.f_code for f in frames)
    code = zlib.crc32(b"".join(c.co_code + c.co_linetable + str(c.co_firstlineno).encode() for c in codes))
    place = zlib.crc32(repr([f.f_lasti for f in frames]).encode())
    texts = [linecache.getline(f.f_code.co_filename, f.f_lineno, f.f_globals).strip() for f in frames]
    text = zlib.crc32("\n".join(texts).encode()) if any(texts) else 0
    values: dict[str, Any] = _sweep()
    for frame in frames:
        found = frame.f_locals
        values |= {name: found[name] for name in _loop_variables(frame) if name in found}
        for value in list(found.values()):
            if type(value).__module__.startswith("optuna.trial") and hasattr(value, "number"):
                values |= {"trial": value.number, **value.params}
    plain = {name: value for name, value in values.items() if _is_plain(value)}
    # Models and classes tell trainings apart where nothing plain does.
    shown = plain or {
        name: getattr(value, "__qualname__", type(value).__name__) for name, value in values.items()
    }
    loops = _as_path(",".join(f"{name}={value}" for name, value in shown.items()))
    arguments = {k: v for f in frames for k, v in _arguments(f)}
    if os.environ.get(RANK, own := str(os.getpid())) != own:  # the script may start a program for each fold
        arguments["command"] = f"{zlib.crc32(_OF_A_START.sub('', ' '.join(sys.argv)).encode()):08x}"
    return CallSite(lines, code, place, text, loops, arguments)


def _sweep() -> dict[str, Any]:
    """The run that a W&B sweep or a multirun of Hydra's has begun in this process: each has settings of its own."""
    run: Any = getattr(sys.modules.get("wandb"), "run", None)
    hydra: Any = sys.modules.get("hydra.core.hydra_config")
    settings: Any = getattr(hydra.HydraConfig.instance().cfg, "hydra", None) if hydra else None
    several = getattr(getattr(settings, "mode", None), "name", "") == "MULTIRUN"
    found = {"hydra": settings.job.override_dirname} if several else {}
    return found | ({"wandb": run.id} if getattr(run, "sweep_id", None) else {})


def _arguments(frame: FrameType) -> Iterator[tuple[str, str]]:
    """Yield what a function was called with, as far as it is plain and says which training this is."""
    code, found = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
    for name in code.co_varnames[:count]:
        for path, value in islice(_leaves(f"{code.co_name}.{name}", found.get(name)), _MOST):
            if _FOLLOWS_THE_START.search(path.partition(".")[2]):
                continue
            number = isinstance(value, Number) and not isinstance(value, bool)
            text = f"{value:g}" if isinstance(value, float) else str(value)
            text = text if number else _OF_A_START.sub("", text)
            yield path, f"{'#' * number}{zlib.crc32(text.encode()):08x}"


def _leaves(path: str, value: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """The plain values of an argument: its own, or those of a dict, a configuration, parsed options."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name, None) for each in fields(value)}
    elif type(value).__name__ in ("Namespace", "SimpleNamespace"):
        value = vars(value)
    if isinstance(value, Mapping) and depth:
        for name, part in islice(value.items(), _MOST):
            yield from _leaves(f"{path}.{name}", part, depth - 1)
    elif isinstance(value, list | tuple):
        return  # what is left to do, or its order
    elif _is_plain(value):
        yield path, value
    elif callable(value):
        yield path, getattr(value, "__qualname__", type(value).__name__)


def frames_of_the_user(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        file = frame.f_code.co_filename
        if began_in(frame):
            return  # beyond it is what has started this process
        if not file.startswith((*_LIBRARIES, "<frozen")) and not _PACKAGES.search(file):
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
