"""Logs of real clusters as rows: which of them were trainings, on how many GPUs, for how long.

Read are `sacct --parsable2`, Philly's JSON and the CSV made of it, Helios and Acme. A row that is no training, or that
cannot be read, is left out and counted with its reason: a log of months always has such rows.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pollux.private_folder import open_named, read_named
from polluxd.sim.workload import Line, TraceError, lines
from polluxd.slurm.sacct_text import NoSacctText, gpus_of, moment, rows, seconds_of

SHORTEST = 60.0
"""Jobs that ran for less are left out: failed starts, for the most part [s]."""
_ENDED_WELL = frozenset(("COMPLETED", "Pass"))


@dataclass(frozen=True, slots=True)
class Recorded:
    """One training as a log has it."""

    line: Line
    name: str
    submitted: float
    """POSIX seconds; of times without a zone as if they were UTC: only differences matter."""
    seconds: float
    gpus: int


@dataclass(frozen=True, slots=True)
class Log:
    """The trainings of a log by their submission, and the rest of it."""

    jobs: tuple[Recorded, ...]
    left_out: Mapping[str, int]
    """Rows that are no training, by reason."""
    has_states: bool
    """It says how jobs ended. In a log that does not, failed and cancelled jobs count as trainings."""


class _LeftOut(Exception):
    """The row is no training."""


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of log."""

    columns: tuple[str, ...]
    """By which it is recognised."""
    read: Callable[[Line], Recorded]
    """Return the row's training. Raises _LeftOut, and TraceError where the row cannot be read."""
    lines: Callable[[Path, Sequence[str]], Iterator[Line]] = lines
    state: str = "state"
    """The column that says how a job ended."""


def _stamp(line: Line, column: str) -> float:
    value = line.text(column)
    try:
        at = moment(value)
    except ValueError:
        at = None
    if at is None:
        raise line.fault(f"{column} is {value!r}", "expected a time such as 2024-05-01T13:37:00")
    return at


def _ended_well(line: Line, column: str) -> None:
    """Raise _LeftOut if the row's state is none of a training that ended."""
    # Slurm writes "CANCELLED by 1000".
    state = (line.values.get(column) or "").split(maxsplit=1)
    if state and state[0] not in _ENDED_WELL:
        word = re.sub(r"[^A-Za-z_]", "?", state[0])[:20]
        raise _LeftOut(f"state {word}")


def _training(line: Line, name: str, gpus: int, submitted: str, seconds: float) -> Recorded:
    if gpus == 0:
        raise _LeftOut("no GPU")
    if seconds < SHORTEST:
        raise _LeftOut(f"under {SHORTEST:.0f} s")
    return Recorded(line, name, _stamp(line, submitted), seconds, gpus)


def _philly(line: Line) -> Recorded:
    gpus = line.whole("num_gpus", 0)
    return _training(line, f"philly-{line.number}", gpus, "timestamp", line.number_in("duration", 0))


def _helios(line: Line) -> Recorded:
    _ended_well(line, "state")
    gpus = line.whole("gpu_num", 0)
    if gpus == 0:
        raise _LeftOut("no GPU")
    return _training(line, f"job-{line.number}", gpus, "submit_time", line.number_in("duration", 0))


def _sacct(line: Line) -> Recorded:
    number = line.text("JobID")
    if "." in number:
        raise _LeftOut("step of a job")
    _ended_well(line, "State")
    gpus = gpus_of(line.values.get("AllocTRES") or "")[0]
    if gpus == 0:
        raise _LeftOut("no GPU")
    seconds = seconds_of(line.text("Elapsed"))
    if seconds is None:
        raise line.fault(
            f"Elapsed is {line.text('Elapsed')!r}", "expected [DAYS-]HH:MM:SS, as sacct prints it"
        )
    return _training(line, f"job-{number}", gpus, "Submit", seconds)


def _sacct_rows(path: Path, columns: Sequence[str]) -> Iterator[Line]:
    try:
        names, found = rows(path, columns)
        for number, fields in found:
            yield Line(path, number, {} if fields is None else dict(zip(names, fields, strict=True)))
    except NoSacctText as error:
        raise TraceError(
            f"{path}, line 1: {_short(str(error))}; give sacct "
            "--parsable2 --format=JobID,Submit,Elapsed,AllocTRES,State"
        ) from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}); check the path") from None


def _philly_json_rows(path: Path, _columns: Sequence[str]) -> Iterator[Line]:
    """Yield the jobs of Philly's `cluster_job_log` with the columns of a table; a job's last attempt counts."""
    try:
        jobs = json.loads(read_named(path).decode("utf-8-sig", "replace"))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except (ValueError, RecursionError):
        raise TraceError(f"{path}: is no JSON, though it begins with [; export it again") from None
    for number, job in enumerate(jobs, 1):
        try:
            yield Line(path, number, _philly_row(job))
        except (AttributeError, KeyError, TypeError, ValueError, IndexError):
            yield Line(path, number, {})


def _philly_row(job: Any) -> dict[str, str]:
    row = {
        "status": str(job["status"]),
        "submitted_time": str(job["submitted_time"]),
        "gpus": "0",
        "seconds": "0",
    }
    if job["attempts"]:
        last = job["attempts"][-1]
        row["gpus"] = str(sum(len(node["gpus"]) for node in last["detail"]))
        if last["start_time"] and last["end_time"]:
            began, ended = (datetime.fromisoformat(last[key]) for key in ("start_time", "end_time"))
            row["seconds"] = str((ended - began).total_seconds())
    return row


def _philly_job(line: Line) -> Recorded:
    _ended_well(line, "status")
    gpus, seconds = line.whole("gpus", 0), line.number_in("seconds", 0)
    return _training(line, f"philly-{line.number}", gpus, "submitted_time", seconds)


PHILLY = Format(("timestamp", "duration", "num_gpus"), _philly)
PHILLY_JSON = Format((), _philly_job, _philly_json_rows, "status")
HELIOS = Format(("submit_time", "duration", "gpu_num"), _helios)
"""Acme's traces have the same columns."""
SACCT = Format(("JobID", "Submit", "Elapsed", "AllocTRES"), _sacct, _sacct_rows, "State")


def recognise(path: Path) -> Format | None:
    """Return the format of a log by its first line; None for another file.

    Of these files, only the output of `sacct --parsable2` has columns between bars.
    """
    try:
        with io.TextIOWrapper(open_named(path), encoding="utf-8-sig") as file:
            header = file.readline(10_000)
    except (OSError, UnicodeDecodeError):
        return None
    if header.lstrip().startswith("["):
        return PHILLY_JSON
    if "|" in header:
        return SACCT
    names = {name.strip() for name in header.split(",")}
    return next((kind for kind in (PHILLY, HELIOS) if names.issuperset(kind.columns)), None)


def read_log(path: Path, kind: Format) -> Log:
    """Read the log's trainings, in order of submission. Raises TraceError for a file without any."""
    found: list[Recorded] = []
    left_out: Counter[str] = Counter()
    has_states, first = False, ""
    for line in kind.lines(path, kind.columns):
        has_states = has_states or bool(line.values.get(kind.state))
        try:
            if not line.values or None in line.values:
                raise line.fault("not as many fields as columns", "is there a separator in a name?")
            found.append(kind.read(line))
        except _LeftOut as reason:
            left_out[str(reason)] += 1
        except TraceError as error:
            left_out["cannot be read"] += 1
            first = first or str(error)
    if first:
        left_out[f"cannot be read ({_short(first.removeprefix(f'{path}, '))} is the first)"] = left_out.pop(
            "cannot be read"
        )
    if not found:
        why = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common()) or "no row at all"
        raise TraceError(
            f"{path}: no training that ran on GPUs for {SHORTEST:.0f} s ({why}); ask for a longer time"
        )
    found.sort(key=lambda job: (job.submitted, job.line.number))
    return Log(tuple(found), dict(left_out.most_common()), has_states)


def _short(text: str) -> str:
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= 200 else f"{text[:200]} ..."
