"""Watch a trainer's own checkpoints."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import glob
import logging
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from pollux.private_folder import led_by_others

log = logging.getLogger("pollux")

MOST_NAMES = 100_000
"""Names that one look passes: in a folder that others may write to, they may put any number, and loops of links."""
QUIET_S, LONGEST_QUIET_S = 1.0, 60.0
"""A checkpoint is complete once nothing of it has changed for as long as it was being written, within these bounds."""
RESTLESS_S = 600.0
"""What changes for so long is no checkpoint, and the user is told."""
_LOOK_S = 1.0


@dataclass(slots=True)
class _Save:
    """A match of the pattern that has changed."""

    begun: tuple[float, float]
    """Time, and the trainer's step."""
    changed_at: float
    step: float | None = None
    """The trainer's, a look after the last change: lines of earlier steps may come late."""


class Checkpoints:
    """What matches a pattern, by this process's clock: a file system's may differ from the node's.

    A file that is new, or another one than before, is a checkpoint. One that is removed says nothing: trainers keep the
    best or the last few. It is complete once it is quiet, and also once the trainer has made steps since and begins the
    next one: some save all the time.

    Args:
        pattern: glob(7); `**` stands for any number of folders, and for none that a link leads to. Where it matches a
            folder, the files right in it count. What another user makes or removes counts for nothing, nor what is
            found by another user's link: an order would be answered without a checkpoint.
        step: the trainer's newest one. Trainers save each so many steps, which take another time at another size.
    """

    def __init__(
        self,
        pattern: str,
        clock: Callable[[], float] = time.monotonic,
        step: Callable[[], float] = lambda: 0.0,
    ) -> None:
        # Within quotes, which keep the `*`, a shell expands nothing.
        self._pattern, self._clock, self._step = os.path.expanduser(os.path.expandvars(pattern)), clock, step
        self.folder = Path(re.split(r"[*?[]", self._pattern)[0]).parent
        self._look_at = float("-inf")
        self._said = set[str]()
        self._files = self._found()
        self._known = dict(self._files)
        """With those that were removed: one that comes back is no new one."""
        self._fresh: dict[str, _Save] = {}
        """By match: what is not known to be complete."""
        self._saves: deque[tuple[float, float]] = deque(maxlen=2)
        """Time and step at which the newest complete ones were begun; the first step after a start stands for one."""
        self._completed_at = float("-inf")

    def trains(self) -> None:
        """Take in that the trainer has made its first step since its start, from the checkpoint before."""
        self._saves.clear()
        self._saves.append((self._clock(), self._step()))
        self._completed_at = float("-inf")

    def look(self, *, ended: bool = False) -> None:
        """Look at the files, once a second at most; where the trainer has `ended`, what it wrote is complete."""
        now = self._clock()
        if now < self._look_at and not ended:
            return
        self._files = self._found()
        # A slow file system is not asked all the time.
        self._look_at = now + max(_LOOK_S, 10.0 * (self._clock() - now))
        changed = {key[0] for key, mark in self._files.items() if self._known.get(key) != mark}
        self._known |= self._files
        self._follow(changed, now, self._step())
        if not self._fresh:
            return
        begun = min(save.begun for save in self._fresh.values())
        if now - begun[0] > RESTLESS_S:
            self._say(
                "what matches --checkpoints %r has changed all the time for %.0f s, so it is not seen complete: name "
                "files that change only then",
                RESTLESS_S,
            )
        if changed and not ended:
            return
        changed_at = max(save.changed_at for save in self._fresh.values())
        quiet = min(max(QUIET_S, changed_at - begun[0]), LONGEST_QUIET_S)
        names = [name for match, name in self._files if match in self._fresh]
        if ended or (now - changed_at >= quiet and not _written(names)):
            self._saves.append(begun)
            self._fresh, self._completed_at = {}, now

    def _follow(self, changed: set[str], now: float, step: float) -> None:
        """Take in the matches that have changed at this look: the trainer has completed those before a newer one."""
        fresh = self._fresh
        over = {match for match, save in fresh.items() if save.step is not None and step > save.step}
        begun, done = changed - (fresh.keys() - over), over - changed
        last = max((fresh[match].begun for match in done), default=(now, step))
        # Where one that was begun no later still changes, both are of one checkpoint, of two nodes say.
        if begun and done and all(match in over or save.begun > last for match, save in fresh.items()):
            self._saves.append(last)
            self._completed_at = now
            fresh = {match: save for match, save in fresh.items() if match not in done}
        for match, save in fresh.items():
            if match in changed:
                save.changed_at, save.step = now, None
            elif save.step is None:
                save.step = step
        present = {match for match, _ in self._files}
        self._fresh = {
            # Trainers remove an old one once there is a newer one.
            match: save
            for match, save in fresh.items()
            if match in present or (begun and step > save.begun[1])
        } | {match: _Save((now, step), now) for match in begun}

    @property
    def present(self) -> bool:
        """There is a checkpoint."""
        return bool(self._files)

    def saved_since(self, when: float) -> bool:
        """Tell whether a checkpoint was completed after this time of the clock."""
        return self._completed_at > when

    @property
    def age(self) -> float:
        """Seconds since the newest complete checkpoint was begun, or since the first step."""
        return self._clock() - self._saves[-1][0] if self._saves else 0.0

    @property
    def last_step(self) -> float:
        """The trainer's step at the newest checkpoint, or at its start."""
        return self._saves[-1][1] if self._saves else 0.0

    @property
    def every(self) -> float | None:
        """Steps from one checkpoint to the next, by the last two; None before they were seen."""
        steps = self._saves[-1][1] - self._saves[-2][1] if len(self._saves) > 1 else 0.0
        return steps if steps > 0 else None

    def _found(self) -> dict[tuple[str, str], tuple[float, int]]:
        """Return time of change and size of each file, by the match and its own name."""
        found, left, user = dict[tuple[str, str], tuple[float, int]](), iter(range(MOST_NAMES)), os.geteuid()
        elsewhere = functools.cache(led_by_others)
        for name in matching(self._pattern, left):
            with contextlib.suppress(OSError):
                facts = os.stat(name)
                if facts.st_uid != user or os.lstat(name).st_uid != user or elsewhere(Path(name).parent):
                    continue
                if not stat.S_ISDIR(facts.st_mode):
                    found[name, name] = facts.st_mtime, facts.st_size
                    continue
                for entry in _entries(name, left):
                    inside = entry.stat(follow_symlinks=False)
                    if inside.st_uid == user and stat.S_ISREG(inside.st_mode):
                        found[name, entry.path] = inside.st_mtime, inside.st_size
        if next(left, None) is None:
            told = (
                "--checkpoints %r passes more than %d names, and those behind are not seen: name fewer files"
            )
            self._say(told, MOST_NAMES)
        return found

    def _say(self, words: str, bound: float) -> None:
        if words not in self._said:
            self._said.add(words)
            log.warning(words, self._pattern, bound)


def matching(pattern: str, left: Iterator[int]) -> Iterator[str]:
    """Yield what matches, as glob(7) has it, and names that are not there. Each that is passed takes one of `left`."""
    ways = [("/" if pattern.startswith("/") else "", tuple(filter(None, pattern.split("/"))))]
    while ways:
        at, parts = ways.pop()
        if not parts:
            yield at
            continue
        part, rest = parts[0], parts[1:]
        if part == "**":
            ways.append((at, rest))  # of no folder
        elif not glob.has_magic(part):
            ways += [(os.path.join(at, part), rest)] if next(left, -1) >= 0 else []
            continue
        for entry in _entries(at, left):
            if entry.name.startswith(".") and not part.startswith("."):
                continue
            if part != "**":
                ways += [(entry.path, rest)] if fnmatch.fnmatchcase(entry.name, part) else []
            elif entry.is_dir(follow_symlinks=False):
                ways.append((entry.path, parts))
            elif not rest:
                ways.append((entry.path, ()))


def _entries(folder: str, left: Iterator[int]) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder or ".") as entries:
        for entry, _ in zip(entries, left, strict=False):
            yield entry


def _written(names: Collection[str]) -> bool:
    """Tell whether a process of this node has one of the files open to write, however long it pauses. proc(5)."""
    files = set()
    for name in names:
        with contextlib.suppress(OSError):
            facts = os.stat(name)
            files.add((facts.st_dev, facts.st_ino))
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.lstat(link).st_mode & stat.S_IWUSR:
                facts = os.stat(link)
                if (facts.st_dev, facts.st_ino) in files:
                    return True
    return False
