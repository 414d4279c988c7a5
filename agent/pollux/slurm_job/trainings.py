"""The name of a training: one job may hold many.

A batch script may call `pollux run` several times (a loop over seeds, a pretraining and a finetuning), and a script may
attach several trainings, one after another (folds, phases, members of an ensemble). Each training has a folder of its
own, by which a restart finds it again:

    JOB-SUBMITTED/                    the first training of the first run
    JOB-SUBMITTED/attach-2/           the second training that this run attaches
    JOB-SUBMITTED/run-2/              the second `pollux run` of the batch script (see `runs`)
    JOB-SUBMITTED/run-NAME/attach-B/  pollux run --name NAME, attach(name="B")

A training is counted among those of its process, since a script does the same in each attempt.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pollux.errors import PolluxAgentError

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


@dataclass
class Attached:
    """The trainings that a process has attached."""

    counts: Counter[Path | None] = field(default_factory=Counter)
    """By the run's folder."""
    names: set[tuple[Path | None, str | None]] = field(default_factory=set)

    @property
    def first(self) -> bool:
        """None was attached yet."""
        return not self.counts

    def next(self, folder: Path | None, name: str | None) -> NamedTraining:
        """Return the training that is attached next in a run's folder."""
        number = self.counts[folder] + 1
        own = f"attach-{name or number}" if name or number > 1 else ""
        return NamedTraining(own, self.first)

    def add(self, folder: Path | None, name: str | None) -> NamedTraining:
        """Begin the next training in a run's folder. Raises PolluxAgentError if the user gives a name twice."""
        if name is not None and (folder, checked(name)) in self.names:
            raise PolluxAgentError(
                f"expected each training of a script under a name of its own, got {name!r} twice: write, for example, "
                'attach(..., name=f"fold-{k}")'
            )
        found = self.next(folder, name)
        self.counts[folder] += 1
        self.names.add((folder, name))
        return found


attached = Attached()
"""Those of this process."""

observers: list[Callable[[Any], None]] = []
"""Optional rooms of this process. Each is given every job that `attach` returns."""
