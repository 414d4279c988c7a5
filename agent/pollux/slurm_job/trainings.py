"""The name of a training: one job may hold many.

A batch script may call `pollux run` several times (a loop over seeds, a pretraining and a finetuning), and a script may
attach several trainings, one after another (folds, phases, members of an ensemble). Each training has a folder of its
own, by which a restart finds it again:

    JOB-SUBMITTED/                    the first training of the first run
    JOB-SUBMITTED/attach-2/           the second training that this run attaches
    JOB-SUBMITTED/attach-fold=1/      the one that it attaches in a loop, where the variable `fold` is 1
    JOB-SUBMITTED/run-2/              the second `pollux run` of the batch script (see `runs`)
    JOB-SUBMITTED/run-NAME/attach-B/  pollux run --name NAME, attach(name="B")

A script may leave out what it has done before, so a training in a loop is known by the loop's variables (`call_site`).
The others are counted in their process. Where neither tells two trainings apart, the second one is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pollux.errors import PolluxAgentError
from pollux.slurm_job.call_site import CallSite, call_site

RUN = "POLLUX_RUN"
"""The name of a `pollux run` among those of its job, for its ranks. Empty: the first one."""
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


@dataclass
class Attached:
    """The trainings that a process has attached."""

    counts: Counter[tuple[Path | None, str]] = field(default_factory=Counter)
    """By the run's folder, and by the loops around them."""
    known: set[tuple[Path | None, str | CallSite]] = field(default_factory=set)
    """By name, or by place in the script."""

    @property
    def first(self) -> bool:
        """None was attached yet."""
        return not self.counts

    def next(self, folder: Path | None, name: str | None, *, given: bool = False) -> NamedTraining:
        """Return the training that is attached next in a run's folder; `given`: the script's own folder."""
        site = call_site()
        loops = "" if given else site.loops
        number = self.counts[folder, loops] + 1
        own = name or ",".join(filter(None, (loops, str(number) if number > 1 else "")))
        return NamedTraining(f"attach-{own}" if own else "", self.first, site if name is None else None)

    def add(self, folder: Path | None, name: str | None, *, given: bool = False) -> NamedTraining:
        """Begin the next training in a run's folder. Raises PolluxAgentError where a restart would not know it."""
        found = self.next(folder, name if name is None else checked(name), given=given)
        site = found.site
        if name is not None and (folder, name) in self.known:
            raise PolluxAgentError(
                f"expected each training of a script under a name of its own, got {name!r} twice: write, for example, "
                'attach(..., name=f"fold-{k}")'
            )
        if site is not None and folder is not None and (folder, site) in self.known:
            raise PolluxAgentError(
                f"{' '.join(site.lines[-1:])} attaches a second training, and a restart could not tell the "
                "two apart: no variable of a loop differs. Give each training of the script a name, the same in each "
                'start: attach(..., name=f"trial-{k}")'
            )
        self.counts[folder, "" if given or site is None else site.loops] += 1
        self.known.add((folder, site or name or ""))
        return found


attached = Attached()
"""Those of this process."""

observers: list[Callable[[Any], None]] = []
"""Optional rooms of this process. Each is given every job that `attach` returns."""
