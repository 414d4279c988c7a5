"""The name of a training: one job may hold many.

A batch script may call `pollux run` several times (a loop over seeds, a pretraining and a finetuning), and a script may
attach several trainings, one after another (folds, phases, members of an ensemble). Each training has a folder of its
own, by which a restart finds it again:

    JOB-SUBMITTED/                    the first training of the first run
    JOB-SUBMITTED/attach-2/           the second training that this run attaches
    JOB-SUBMITTED/attach-fold=1/      the one that it attaches in a loop, where the variable `fold` is 1
    JOB-SUBMITTED/run-2/              the second `pollux run` of the batch script (see `runs`)
    JOB-SUBMITTED/run-NAME/attach-B/  pollux run --name NAME, attach(name="B")

A script may leave out what it has done before, or go in another order. So each training leaves a record in its folder
of where it was attached (`call_site`), and is found by it. A script that was edited since is compared by the text of
its calls. Where one place attaches several in one start (a `while` loop, a pool), what the calls are given counts, and
the command line of a program that the script starts. Where nothing matches, trainings are counted in their process.
Where two cannot be told apart, the second one is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pollux.errors import PolluxAgentError
from pollux.private_folder import PrivateFolder, read_private
from pollux.slurm_job.call_site import CallSite, call_site

RUN = "POLLUX_RUN"
"""The name of a `pollux run` among those of its job, for its ranks. Empty: the first one."""
PROCESS = "POLLUX_RUN_PROCESS"
"""The process that stands for a run in its job's record; set for its launchers and their ranks."""
RECORD = "training.json"
_NAME = re.compile(r"(?!\d+$)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def checked(name: str) -> str:
    """Return a name that a user gives. Raises PolluxAgentError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PolluxAgentError(
            "expected the name of a training of letters, digits, '.', '_' and '-', at most 64 and not digits alone, "
            f"got {name!r}"
        )
    return name


@dataclass(frozen=True, slots=True)
class NamedTraining:
    """A training among those of its process."""

    name: str = ""
    """Of its folder in the run's one; empty: the run's folder itself."""
    first: bool = True
    """No other one was attached before."""
    site: CallSite | None = None
    """Where it is attached; None for one that the user has named."""

    def keep(self, directory: Path, *, over: bool = False) -> None:
        """On rank 0: leave a record of it in its folder. `over`: its script has closed it."""
        if self.site is None:
            return
        mine = {name: getattr(self.site, name) for name in ("code", "place", "text", "loops")}
        mine |= {"arguments": dict(self.site.arguments), "over": over, "start": _start(), "pid": os.getpid()}
        with contextlib.suppress(OSError), PrivateFolder.make(directory) as folder:
            folder.write(RECORD, lambda file: file.write(json.dumps(mine).encode()))


@dataclass(frozen=True)
class _Record:
    """What an earlier training has left in its folder."""

    code: int
    place: int
    text: int
    loops: str
    arguments: Mapping[str, str]
    over: bool
    start: str
    pid: int

    @property
    def present(self) -> bool:
        """It was attached in this start."""
        return bool(self.start) and self.start == _start()


def _start(environ: Mapping[str, str] = os.environ) -> str:
    """Name this start of a run's ranks; empty without a run."""
    names = (PROCESS, "SLURM_RESTART_COUNT", "POLLUX_RESTARTS")
    return "/".join(environ.get(name, "") for name in names) if environ.get(PROCESS) else ""


def _records(folder: Path) -> dict[str, _Record]:
    """The trainings without a user's name in a run's folder, by name, the first one first."""
    found, names = dict[str, _Record](), list[str]()
    with contextlib.suppress(OSError), PrivateFolder(folder) as private:
        names = [name for name in private.names() if name.startswith("attach-")]
    for name in ["", *sorted(names, key=lambda name: (len(name), name))]:
        with contextlib.suppress(OSError, ValueError, TypeError):
            found[name] = _Record(**json.loads(read_private(folder / name / RECORD)))
    return found


def _recorded(records: Mapping[str, _Record], site: CallSite) -> dict[str, _Record]:
    """The trainings that were attached here before, as far as what the calls are given does not tell them apart."""
    like = {name: each for name, each in records.items() if each.loops == site.loops}
    here = {name: each for name, each in like.items() if (each.code, each.place) == (site.code, site.place)}
    here = here or {name: each for name, each in like.items() if site.text and each.text == site.text}
    # In one start these are several trainings. Between two starts the arguments of one may have changed.
    telling = _differing([site.arguments, *(each.arguments for each in here.values() if each.present)])
    telling |= _differing([each.arguments for each in here.values()])
    return {n: each for n, each in here.items() if not telling & _differing([each.arguments, site.arguments])}


def _differing(found: Sequence[Mapping[str, str]]) -> set[str]:
    """The names of the arguments that are not the same in all."""
    return {n for one in found for n in one.keys() | found[0].keys() if one.get(n) != found[0].get(n)}


@dataclass
class Attached:
    """The trainings that a process has attached."""

    counts: Counter[tuple[Path | None, str]] = field(default_factory=Counter)
    """By the run's folder, and by the loops around them."""
    known: set[tuple[Any, ...]] = field(default_factory=set)
    """By the run's folder and their name, or their place in the script and what the calls are given."""
    taken: set[tuple[Path | None, str]] = field(default_factory=set)
    """The names of their folders, by the run's one."""

    @property
    def first(self) -> bool:
        """None was attached yet."""
        return not self.counts

    def next(self, folder: Path | None, name: str | None, *, given: bool = False) -> NamedTraining:
        """Return the training that is attached next in a run's folder; `given`: the script's own folder.

        Raises PolluxAgentError where it cannot be told apart from one that is there.
        """
        if name is not None:
            return NamedTraining(f"attach-{name}", self.first)
        site = call_site()
        return NamedTraining(self._name(folder, site, "" if given else site.loops), self.first, site)

    def _name(self, folder: Path | None, site: CallSite, loops: str) -> str:
        """The name of the folder of a training of this site. `loops`: as far as they are a part of it."""
        records = {} if folder is None else _records(folder)
        left = {name: each for name, each in records.items() if (folder, name) not in self.taken}
        mine = next((name for name in _recorded(records, site) if name in left), None)
        if mine is None:
            return self._numbered(folder, site, loops, left)
        if left[mine].over and left[mine].present and left[mine].pid != os.getpid():
            raise PolluxAgentError(SECOND.format(_line(site)))
        return mine

    def _numbered(self, folder: Path | None, site: CallSite, loops: str, left: Mapping[str, _Record]) -> str:
        """The name of one that no record fits, by its number."""
        number = self.counts[folder, loops] + 1
        while True:
            own = ",".join(filter(None, (loops, str(number) if number > 1 else "")))
            name = f"attach-{own}" if own else ""
            there = left.get(name)
            free = there is None or (there.code != site.code and not there.present)
            if free and (folder, name) not in self.taken:
                return name
            elsewhere = there is not None and (there.code, there.place) != (site.code, site.place)
            if elsewhere and there and not (there.over or there.present) and there.loops == site.loops:
                raise PolluxAgentError(ANOTHER_PLACE.format(_line(site)))
            number += 1

    def add(
        self,
        folder: Path | None,
        name: str | None,
        *,
        given: bool = False,
        agree: Callable[[list[str]], list[str]] = list,
    ) -> NamedTraining:
        """Begin the next training in a run's folder. `agree` returns rank 0's value.

        Raises PolluxAgentError where a restart would not know it.
        """
        found, trouble = NamedTraining(), ""
        try:
            found = self._checked(folder, name, given=given)
        except PolluxAgentError as error:
            trouble = str(error)
        # One rank looks: another one might find what this start has begun to write.
        agreed, trouble = agree([found.name, trouble])
        if trouble:
            raise PolluxAgentError(trouble)
        site, found = found.site, NamedTraining(agreed, found.first, found.site)
        self.counts[folder, "" if given or site is None else site.loops] += 1
        self.known.add((folder, name) if site is None else (folder, site, *sorted(site.arguments.items())))
        self.taken.add((folder, found.name))
        return found

    def _checked(self, folder: Path | None, name: str | None, *, given: bool) -> NamedTraining:
        found = self.next(folder, name if name is None else checked(name), given=given)
        if name is not None and (folder, name) in self.known:
            raise PolluxAgentError(
                f"expected each training of a script under a name of its own, got {name!r} twice: write, for example, "
                'attach(..., name=f"fold-{k}")'
            )
        site = found.site
        if site and folder is not None and (folder, site, *sorted(site.arguments.items())) in self.known:
            raise PolluxAgentError(SECOND.format(_line(site)))
        return found


_NAMES = 'Give each training of the script a name, the same in each start: attach(..., name=f"trial-{{k}}")'
SECOND = (
    "{} attaches a second training in this start, and a restart could not tell the two apart: no variable of a loop "
    "differs, and no argument of a call. " + _NAMES
)
ANOTHER_PLACE = (
    "{} attaches a training where an earlier start has attached one at another line, which has not ended: it cannot be "
    "told whether this is the same one. "
    + _NAMES
    + ". To give the earlier one a name, too, call its folder attach-NAME"
)


def _line(site: CallSite) -> str:
    return " ".join(site.lines[-2:])


attached = Attached()
"""Those of this process."""

observers: list[Callable[[Any], None]] = []
"""Optional rooms of this process. Each is given every job that `attach` returns."""
