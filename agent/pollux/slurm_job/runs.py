"""The runs of one job: which training does this `pollux run` go on with?

A run is one call of `pollux run`, or one start of ranks by another launcher. The job's folder records the runs of all
attempts, and each has a name. A run of a later attempt is recognised by its command line and working directory, and by
how often that command line has ended well in this attempt. Where one command line runs several times under variables
that differ (`SEED=3 pollux run train.py`), these variables count, too: a script may skip what it has done.

In a Pollux job, a command line with a time of day in it differs in each attempt. It is taken for the one that was
interrupted if there is one alone, and if the words that differ tell no two runs of the job apart. Where that is not
certain, the run is refused: it would go on from another training's checkpoint, or train again what has been trained.

Outside of Pollux jobs, where a person starts the runs, a new command line begins a training of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shlex
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from pollux.errors import LaunchError
from pollux.private_folder import PrivateFolder
from pollux.slurm_job.access import in_pollux_job
from pollux.slurm_job.environment import job_folder
from pollux.slurm_job.trainings import PROCESS, RUN

logger = logging.getLogger("pollux")

FILE = "runs.json"
UNSEEN = "POLLUX_UNSEEN"
"""Set where this attempt sees nothing of the attempts before."""
FIRST = "first"
"""What a user calls the first training of a folder, whose name is empty."""
_NOT_THE_USERS = re.compile(
    r"(SLURM|SLURMD|SRUN|SBATCH|POLLUX|TORCHELASTIC|PMI|PMIX|GROUP|ROLE|LOCAL|CUDA|NVIDIA|HIP|ROCR|ROCM|GPU|ZE|XDG|SSH"
    r"|LS|BASH|OMP|KRB5\w*|DBUS|MASTER)_.*|RANK|WORLD_SIZE|_|PWD|OLDPWD|SHLVL|HOST|HOSTNAME|TMPDIR|TMP|TEMP|LINES|COLUMNS"
    r"|\w*PORT|RANDOM"
)
"""Variables that say nothing of what is trained, and differ between runs or attempts."""


@dataclass(frozen=True)
class Run:
    """One start of a training's ranks."""

    attempt: str
    words: tuple[str, ...]
    """The script and its arguments."""
    cwd: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """Digests of the user's environment variables."""
    name: str = ""
    """Empty: the first one of its job; else a number, or what the user gave."""
    process: str = ""
    """HOST:PID:START of the process that stands for the run."""
    status: int | None = None
    """Its exit status; None while it runs, and where it was killed."""

    def same(self, other: Run) -> bool:
        return (self.words, self.cwd) == (other.words, other.cwd)

    @property
    def interrupted(self) -> bool:
        """It did not end by itself."""
        return self.status is None or self.status > 128

    @property
    def command(self) -> str:
        return shlex.join(self.words)


def present_run(
    words: Sequence[str], attempt: str, name: str | None, environ: Mapping[str, str] = os.environ
) -> Run:
    """This process's run, without a name that it gets by `choose`."""
    mine = {
        variable: hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()[:8]
        for variable, value in environ.items()
        if not _NOT_THE_USERS.fullmatch(variable)
    }
    return Run(attempt, tuple(words), os.getcwd(), mine, name or "", _process(os.getpid()))


def choose(runs: Sequence[Run], run: Run, *, by_hand: bool = False) -> tuple[str, str]:
    """Return the name of a run that begins, given those before it, and a sentence to say (often empty).

    `by_hand`: outside of a Pollux job. Raises LaunchError where two runs cannot be told apart.
    """
    mine = [each for each in runs if each.attempt == run.attempt]
    for each in runs:
        if each.same(run) and alive(each) and not _differing(each, run):
            raise LaunchError(
                f"`{run.command}` runs already in this job, and a restart could not tell the two apart: give each of "
                "them a name, as in `pollux run --name a ...`"
            )
    # One that failed, and that the script calls again, is tried again.
    taken = {
        name for name, each in _newest(mine).items() if (each.status == 0 and not by_hand) or alive(each)
    }
    open_ = {name: each for name, each in _newest(runs).items() if each.interrupted and name not in taken}
    if any(each.same(run) for each in runs):
        return _known(runs, run, taken, open_), ""
    if by_hand:
        begun = _next(runs)
        told = f"`{run.command}` is another training than `{runs[-1].command}`" if runs else ""
        return begun, told and f"{told}: it begins. To go on with the folder's first one, give --name {FIRST}"
    return _changed(runs, run, taken, open_)


def _known(runs: Sequence[Run], run: Run, taken: Collection[str], open_: Mapping[str, Run]) -> str:
    """The name of a run whose command line an earlier one had."""
    telling = _telling(runs, run)
    same = [each for each in runs if each.same(run)]
    equal = {
        each.name for each in same if all(each.variables.get(v) == run.variables.get(v) for v in telling)
    }
    for name in dict.fromkeys(each.name for each in same):
        if name in equal and name not in taken:
            return name
    doubtful = [each for name, each in open_.items() if each.same(run) and name not in equal]
    if doubtful:
        raise LaunchError(
            f"`{run.command}` was interrupted in this job, and it cannot be told whether this is the same "
            f"training: {_listed(_differing(doubtful[0], run))} differ. {_ADVICE}"
        )
    return _next(runs)


def _changed(
    runs: Sequence[Run], run: Run, taken: Collection[str], open_: Mapping[str, Run]
) -> tuple[str, str]:
    """The name of a run whose command line is new in its job, and a sentence."""
    alike = [each for each in _newest(runs).values() if _alike(each, run) and each.name not in taken]
    doubtful = [each for each in alike if each.name in open_]
    if doubtful:
        # A script that repeats its commands in order begins with the first, and one that skips with the interrupted.
        other = _at_place(runs, len(taken), run.attempt)
        if other in alike and not _told_apart(runs, other, run):
            return other.name, f"goes on with the training of `{other.command}`, now called `{run.command}`"
    elif all(each.attempt != run.attempt for each in runs):
        doubtful = [each for each in alike if not _told_apart(runs, each, run)]
    if doubtful:
        raise LaunchError(
            f"`{run.command}` is new in this job, and it cannot be told whether it is the training of an earlier "
            f"attempt, `{doubtful[0].command}`. {_ADVICE}"
        )
    return _next(runs), ""


_ADVICE = (
    "Name each training of the batch script, the same in each attempt: `pollux run --name seed-1 ...`; or keep what "
    "differs between attempts out of the command line"
)


def _newest(runs: Sequence[Run]) -> dict[str, Run]:
    return {each.name: each for each in runs}


def _next(runs: Sequence[Run]) -> str:
    """The name of a training that begins: a number, from 2 on."""
    numbers = [int(each.name or 1) for each in runs if not each.name or each.name.isdigit()]
    return str(max(numbers) + 1) if numbers else ""


def _alike(one: Run, other: Run) -> bool:
    """Whether one may be the other under a changed command line."""
    return one.attempt != other.attempt and (one.words[:1], one.cwd) == (other.words[:1], other.cwd)


def _at_place(runs: Sequence[Run], place: int, attempt: str) -> Run | None:
    """The run at a place of the newest attempt before this one that has so many, as its name's newest record."""
    earlier = [each for each in runs if each.attempt != attempt]
    for before in reversed(list(dict.fromkeys(each.attempt for each in earlier))):
        of_attempt = [each for each in earlier if each.attempt == before]
        if len(of_attempt) > place:
            return _newest(runs)[of_attempt[place].name]
    return None


def _told_apart(runs: Sequence[Run], one: Run, other: Run) -> bool:
    """Whether two runs differ in a word in which runs of one attempt differ, too, as in that of a seed."""
    like = [each for each in (*runs, other) if each.words[:1] == other.words[:1]]
    same_length = len({len(each.words) for each in like}) == 1

    def parts(each: Run) -> set[Any]:
        return set(enumerate(each.words)) if same_length else set(each.words)

    for attempt in {each.attempt for each in like}:
        sets = [parts(each) for each in like if each.attempt == attempt]
        if (set.union(*sets) - set.intersection(*sets)) & (parts(one) ^ parts(other)):
            return True
    return False


def _telling(runs: Sequence[Run], run: Run) -> set[str]:
    """The variables that differ between runs of this command line in one attempt."""
    found: set[str] = set()
    for attempt in {each.attempt for each in runs}:
        like = [each for each in runs if each.attempt == attempt and each.same(run)]
        if attempt == run.attempt:
            like.append(run)
        for each in like[1:]:
            found |= _differing(like[0], each)
    return found


def _differing(one: Run, other: Run) -> set[str]:
    names = one.variables.keys() | other.variables.keys()
    return {name for name in names if one.variables.get(name) != other.variables.get(name)}


def _listed(names: set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more variables" if len(shown) > 4 else "")


# -- the record -----------------------------------------------------------------------------------------------


def begin_here(
    words: Sequence[str], name: str | None, environ: Mapping[str, str] = os.environ
) -> tuple[dict[str, str], str]:
    """Begin this process's run; return variables that name it for its ranks, and a sentence to say.

    Raises LaunchError where it cannot be told apart.
    """
    folder, by_hand = job_folder(environ), not in_pollux_job(environ)
    if folder is None:
        return ({RUN: name} if name else {}), ""
    attempt = environ.get("SLURM_RESTART_COUNT") or "0"
    if by_hand:
        # An interactive shell makes each command the leader of a process group; in a script, the script leads it.
        attempt = (
            f"{environ['SLURM_JOB_ID']}.{attempt}" if "SLURM_JOB_ID" in environ else _process(os.getpgrp())
        )
    run = present_run(words, attempt, name, environ)
    if by_hand and (task := environ.get("SLURM_ARRAY_TASK_ID")):
        run = _replaced(run, cwd=f"{run.cwd} (task {task})")
    found = begin(folder, run, by_hand=by_hand)
    sentence = found.sentence
    if found.name:
        where = f"training {found.name!r} of this job, with checkpoints in {folder / f'run-{found.name}'}"
        sentence = f"{where}: {sentence}" if sentence else where
    return {RUN: found.name, PROCESS: run.process, UNSEEN: "1" if found.alone else ""}, sentence


class Begun(NamedTuple):
    """A run that was recorded."""

    name: str
    sentence: str
    """To say; often empty."""
    alone: bool = False
    """Earlier attempts have left nothing in the folder."""


def begin(folder: Path, run: Run, *, by_hand: bool = False) -> Begun:
    """Record a run in the job's folder.

    Raises LaunchError as `choose`, and where the record is damaged. Where the folder cannot be written, no checkpoint
    can be, either: the run is named by what could be read.
    """
    name, sentence, alone = "" if run.name == FIRST else run.name, "", False
    try:
        with _locked(folder) as private:
            runs = _read(private)
            if run.name:
                _check_name(runs, _replaced(run, name=name))
            else:
                name, sentence = choose(runs, run, by_hand=by_hand)
            alone = not by_hand and run.attempt != "0" and not runs
            if alone:
                sentence = (
                    f"attempt {run.attempt} of this job finds nothing of the attempts before in {folder}. If they have "
                    "trained, this node does not see their folder, or it was removed: THIS TRAINING BEGINS FROM ITS "
                    "START. Let POLLUX_CHECKPOINT_DIR name a folder that all nodes share"
                )
            _write(private, [*runs, _replaced(run, name=name)])
    except OSError as error:
        logger.warning("the runs of this job cannot be recorded in %s: %s", folder, error)
    return Begun(name, sentence, alone)


def end(folder: Path, process: str, status: int) -> None:
    """Record how the run of a process has ended."""
    with contextlib.suppress(OSError, LaunchError), _locked(folder) as private:
        _write(
            private,
            [_replaced(each, status=status) if each.process == process else each for each in _read(private)],
        )


def status_of(folder: Path, process: str) -> int | None:
    """How the run of a process has ended, as recorded; None where that is not recorded."""
    with contextlib.suppress(OSError, LaunchError), PrivateFolder(folder) as private:
        return next((each.status for each in _read(private) if each.process == process), None)
    return None


def is_command_of_run(command: Sequence[str], environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a process's command is that of its job's run, which `choose` has looked at, and not a child's of it."""
    folder, words = job_folder(environ), []
    if folder is not None:
        with contextlib.suppress(OSError, LaunchError), PrivateFolder(folder) as private:
            mine = [each for each in _read(private) if each.process == environ.get(PROCESS)]
            words = list(mine[-1].words) if mine else []
    arguments = list(command[1:])
    named = not command or any(Path(word).name == Path(command[0]).name for word in words) or "-m" in words
    return not words or (named and words[len(words) - len(arguments) :] == arguments)


def _check_name(runs: Sequence[Run], run: Run) -> None:
    for each in runs:
        if (each.attempt, each.name) == (run.attempt, run.name) and alive(each):
            raise LaunchError(f"the training {run.name!r} runs already in this job, as `{each.command}`")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[PrivateFolder]:
    """The job's folder, while no other run of the job changes the record."""
    with PrivateFolder.make(folder) as private, private.change(f".{FILE}.lock") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield private


def _read(private: PrivateFolder) -> list[Run]:
    """The record. Raises OSError if it cannot be read, LaunchError if it is damaged."""
    names = {each.name for each in fields(Run)}
    try:
        with private.read(FILE) as file:
            found: Any = json.loads(file.read())
        if not all(each.keys() == names for each in found):
            raise ValueError(f"expected {', '.join(sorted(names))} of each run")
        return [Run(**{**each, "words": tuple(each["words"])}) for each in found]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, AttributeError) as error:
        raise LaunchError(
            f"{private.path / FILE}, by which this job tells its trainings apart, is damaged ({error}): give each "
            "`pollux run` of the batch script a --name, and move the file away"
        ) from error


def _write(private: PrivateFolder, runs: Sequence[Run]) -> None:
    content = json.dumps([asdict(each) for each in runs]).encode()
    private.write(FILE, lambda file: file.write(content))


def _replaced(run: Run, **changes: Any) -> Run:
    return Run(**{**asdict(run), "words": run.words, **changes})


def alive(run: Run) -> bool:
    """Whether the process that stands for a run is there. On another host it counts as gone."""
    host, _, rest = run.process.partition(":")
    pid, _, _ = rest.partition(":")
    return run.status is None and host == socket.gethostname() and _process(pid) == run.process


def _process(pid: int | str) -> str:
    """HOST:PID:START of a process of this machine; START is empty where it is gone. proc(5)."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = ""
    return f"{socket.gethostname()}:{pid}:{started}"
