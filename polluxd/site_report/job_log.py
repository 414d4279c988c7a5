"""Jobs of months as columns of numbers: sacct's text, and the published log of Philly.

Plain Python reads the lines and numpy keeps the columns: no further package is needed, a broken row costs itself alone
(a table reader's rules for quotes and line ends are not sacct's), and a million rows take some ten seconds.
"""

from __future__ import annotations

import re
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polluxd.sim.cluster_logs import PHILLY, recognise
from polluxd.sim.workload import Line, TraceError, lines
from polluxd.slurm.sacct_text import NoSacctText, gpus_of, moment, rows

Numbers = NDArray[Any]

COLUMNS = (
    *("JobIDRaw", "JobID", "Partition", "Account", "User", "State", "Submit", "Eligible", "Start", "End"),
    *("Elapsed", "TimelimitRaw", "NNodes", "ReqTRES", "AllocTRES", "NodeList", "JobName"),
)
"""JobName is last: separators in a name cost only the name. Slurm 20.11 has all of them."""
OPTIONAL = ("JobID", "Eligible", "Elapsed", "TimelimitRaw", "NNodes", "ReqTRES", "NodeList", "JobName")
FINISHED, RUNNING = "COMPLETED", "RUNNING"
STATES = (
    *(
        FINISHED,
        RUNNING,
        "FAILED",
        "TIMEOUT",
        "CANCELLED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "BOOT_FAIL",
        "DEADLINE",
    ),
    *("PREEMPTED", "REQUEUED", "REVOKED", "RESIZING", "PENDING", "SUSPENDED", "COMPLETING"),
)
_MOST_GPUS = 1 << 20
_TASKS = re.compile(r"_\[([0-9,:%-]{1,4000})")


def command(since: str, until: str) -> str:
    """Return the command whose output is read: for times in UTC, each run of a requeued job, and no steps."""
    return (
        "TZ=UTC0 SLURM_TIME_FORMAT=%s sacct --allusers --duplicates --allocations --noconvert --parsable2 "
        f"--starttime={since} --endtime={until} --format={','.join(COLUMNS)}"
    )


@dataclass(frozen=True, slots=True)
class JobLog:
    """Jobs that held GPUs, or asked for some: one entry per run of a job, in order of the log."""

    job: Numbers
    submit: Numbers
    """POSIX seconds, like all times."""
    eligible: Numbers
    """NaN: it was never eligible, or the log does not say."""
    start: Numbers
    """NaN: it never started."""
    end: Numbers
    """NaN: it has not ended."""
    limit: Numbers
    """Seconds; NaN: none."""
    gpus: Numbers
    """Held, or asked for."""
    nodes: Numbers
    tasks: Numbers
    """Of a pending array, which is one record."""
    state: Numbers
    """A place in STATES."""
    codes: Mapping[str, Numbers]
    """Places in `names`: partition, account, user, name (without digits), type (of GPU asked for), places."""
    names: Mapping[str, Sequence[str]]
    left_out: Mapping[str, int]
    """Rows that are no record of a GPU job, by reason."""
    read: int
    """Rows, the header excepted."""
    zoned: bool
    """Times have no zone: they are those of the site's clocks, daylight saving included."""
    waits_known: bool = True
    missing: tuple[str, ...] = ()
    """What this log does not have, as sentences."""

    def __len__(self) -> int:
        return len(self.job)

    def only(self, chosen: Numbers) -> JobLog:
        """Return the log with the chosen records alone."""
        columns = {key: getattr(self, key)[chosen] for key in NUMBERS}
        return replace(self, **columns, codes={key: codes[chosen] for key, codes in self.codes.items()})


NUMBERS = ("job", "submit", "eligible", "start", "end", "limit", "gpus", "nodes", "tasks", "state")
_CODED = ("partition", "account", "user", "name", "type", "places")


class _NoRecord(Exception):
    """The row is no record of a GPU job."""


class _Columns:
    """Columns that grow row by row."""

    def __init__(self) -> None:
        self.numbers: dict[str, array[Any]] = {key: array("d") for key in NUMBERS}
        self.coded: dict[str, array[Any]] = {key: array("q") for key in _CODED}
        self.known: dict[str, dict[str, int]] = {key: {} for key in _CODED}
        self.left_out: Counter[str] = Counter()
        self.read = 0

    def add(self, numbers: Sequence[float], words: Sequence[str]) -> None:
        for column, number in zip(self.numbers.values(), numbers, strict=True):
            column.append(number)
        for key, word in zip(_CODED, words, strict=True):
            known = self.known[key]
            self.coded[key].append(known.setdefault(word, len(known)))

    def made(self, *, zoned: bool, missing: tuple[str, ...], waits_known: bool = True) -> JobLog:
        return JobLog(
            **{key: np.frombuffer(column, dtype=float) for key, column in self.numbers.items()},
            codes={key: np.frombuffer(column, dtype=np.int64) for key, column in self.coded.items()},
            names={key: tuple(known) for key, known in self.known.items()},
            left_out=dict(self.left_out.most_common()),
            read=self.read,
            zoned=zoned,
            waits_known=waits_known,
            missing=missing,
        )


_NAN = float("nan")
_NOW = time.time()
_STATE = {name: float(place) for place, name in enumerate(STATES)}
_OPEN = frozenset((RUNNING, "SUSPENDED", "COMPLETING", "RESIZING", "REQUEUED", "PENDING"))
_DIGITS = re.compile(r"\d+")


def read_sacct(path: Path) -> JobLog:
    """Read the output of `command`. Raises TraceError for a file that is none."""
    columns = _Columns()
    needed = [name for name in COLUMNS if name not in OPTIONAL]
    try:
        names, found = rows(path, needed)
        order = [names.index(name) if name in names else len(names) for name in COLUMNS]
        pick = itemgetter(*order)
        epoch = False
        for _, fields in found:
            columns.read += 1
            if fields is None:
                columns.left_out["broken: not as many fields as columns"] += 1
                continue
            fields.append("")  # of a column that the file does not have
            try:
                words = pick(fields)
                columns.add(*_row(words))
                epoch = epoch or words[6].isdecimal()
            except _NoRecord as reason:
                columns.left_out[str(reason)] += 1
    except NoSacctText as error:
        raise TraceError(f"{path}, line 1: {error}; make the file with: {command('TIME', 'TIME')}") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    lacking = [f"the file has no column {name}" for name in OPTIONAL if name not in names]
    return columns.made(zoned=not epoch, missing=tuple(lacking))


def _time(text: str, column: str) -> float | None:
    try:
        return moment(text)
    except (ValueError, OverflowError):
        raise _NoRecord(f"broken: {column} is no time") from None


def _known(at: float | None) -> float:
    return _NAN if at is None else at


def _times(
    submit: str, eligible: str, start: str, end: str
) -> tuple[float, float | None, float | None, float | None]:
    submitted, began, ended = _time(submit, "Submit"), _time(start, "Start"), _time(end, "End")
    if submitted is None:
        raise _NoRecord("broken: Submit is no time")
    if max(submitted, began or 0.0, ended or 0.0) > _NOW + 86400:
        raise _NoRecord("broken: a time in the future")
    if began is not None and ended is not None and ended < began:
        raise _NoRecord("broken: it ends before it starts")
    return submitted, _time(eligible, "Eligible"), began, ended


def _row(fields: tuple[str, ...]) -> tuple[tuple[float, ...], tuple[str, ...]]:
    raw, shown, partition, account, user, state, submit, eligible, start, end = fields[:10]
    _, limit, nodes, asked, held, places, name = fields[10:]
    if "." in raw:
        raise _NoRecord("step of a job")
    job = raw.partition("+")[0].partition("_")[0]
    if not (job.isdecimal() and job.isascii() and len(job) < 16):
        raise _NoRecord("broken: JobIDRaw is no number")
    word = state.split(" ", 1)[0].rstrip("+")
    if word not in _STATE:
        raise _NoRecord("broken: unknown state")
    submitted, able, began, ended = _times(submit, eligible, start, end)
    ran = began is not None and (ended is None or ended > began)
    gpus, kind, had = _gpus(held, asked, ran=ran)
    if not had:
        began = None
    elif began is None:
        raise _NoRecord("held GPUs, and the record has no start (Slurm before 26.05.4 loses it at a requeue)")
    if ended is None and word not in (("PENDING", "REQUEUED") if began is None else _OPEN):
        raise _NoRecord("broken: its state is one of the end, and it has no end")
    if began is not None:
        able = min(submitted if able is None else able, began)
    count = int(nodes) if nodes.isascii() and nodes.isdecimal() and len(nodes) < 7 else 1
    seconds = float(limit) * 60 if limit.isascii() and limit.isdecimal() and len(limit) < 10 else _NAN
    tasks = _tasks(shown) if began is None and "[" in shown else 1.0
    numbers = (
        *(float(job), submitted, _known(able), _known(began), _known(ended)),
        *(seconds, float(gpus), float(max(count, 1)), tasks, _STATE[word]),
    )
    held_at = "" if began is None else places
    return numbers, (partition, account, user, _DIGITS.sub("#", name[:200]), kind, held_at)


def _gpus(held: str, asked: str, *, ran: bool) -> tuple[int, str, bool]:
    """Return number and type of a job's GPUs, and whether it had them or has asked for them."""
    gpus, _ = gpus_of(held)
    requested, kind = gpus_of(asked)
    if not gpus and not requested:
        raise _NoRecord("no GPU")
    if not gpus and ran:
        raise _NoRecord("broken: it ran, and AllocTRES names no GPU though ReqTRES does")
    if (gpus or requested) > _MOST_GPUS:
        raise _NoRecord("broken: more GPUs than any cluster has")
    return gpus or requested, kind, bool(gpus)


def _tasks(shown: str) -> float:
    """Count the tasks of a pending array, `123_[5-10,12%2]`."""
    if (found := _TASKS.search(shown)) is None:
        return 1.0
    count = 0
    for part in found[1].split("%")[0].split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        if first.isdecimal():
            final = int(last[:9]) if last.isdecimal() else int(first[:9])
            count += (
                max(final - int(first[:9]), 0) // max(int(step[:9] or 1) if step.isdecimal() else 1, 1) + 1
            )
    return float(min(max(count, 1), 10_000_000))


_PHILLY_LACKS = (
    "it has one time per job: each job is taken to start when it was submitted, so nothing is known of waits, "
    "and the GPUs held at a time are an estimate",
    "it does not say how jobs ended: all of them count as finished",
    "it does not say which nodes a job had: each partition counts as one large node, and fragments are not seen",
    "it does not say how many GPUs there were: the most that were held at a time count as all",
)


def read(path: Path) -> JobLog:
    """Read a log; its first line says what kind it is. Raises TraceError."""
    if recognise(path) is not PHILLY:
        return read_sacct(path)
    columns = _Columns()
    for line in lines(path, PHILLY.columns):
        columns.read += 1
        try:
            columns.add(*_row(_like_sacct(line)))
        except _NoRecord as reason:
            columns.left_out[str(reason)] += 1
        except TraceError:
            columns.left_out["broken: a value is missing, or no number"] += 1
    return columns.made(zoned=True, missing=_PHILLY_LACKS, waits_known=False)


def _like_sacct(line: Line) -> tuple[str, ...]:
    """Return a row of Philly's log with the fields of sacct."""
    row = {name: value or "" for name, value in line.values.items()}
    gpus, start = f"gres/gpu={line.whole('num_gpus', 0)}", row["timestamp"]
    began = _time(start, "timestamp")
    end = start if began is None else str(round(began + line.number_in("duration", 0)))
    known = {"JobIDRaw": str(line.number), "Partition": row.get("cluster", ""), "State": FINISHED}
    known |= dict.fromkeys(("Submit", "Eligible", "Start"), start) | {"End": end}
    known |= {"ReqTRES": gpus, "AllocTRES": "" if began is None else gpus}
    return tuple(known.get(name, "") for name in COLUMNS)
