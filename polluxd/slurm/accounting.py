"""What a job used, from Slurm's accounting (sacct(1)).

slurmdbd has one record per attempt of a job, and one more where the job gave nodes back. Companions are jobs of their
own; the submission hook names their job in AdminComment, which users cannot set.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polluxd.errors import DirectiveError, SlurmGarbled
from polluxd.slurm.directives import Directives, parse_admin_comment

_FIELDS = (
    *("JobIDRaw", "UID", "State", "Submit", "Start", "End"),
    *("ElapsedRaw", "ConsumedEnergyRaw", "AllocTRES", "AdminComment"),
)
"""AdminComment comes last: features joined by `|` stand in it. No field is a user's text."""
_GPUS = re.compile(r"(?:^|,)gres/gpu=(\d{1,18})(?:,|$)")


@dataclass(frozen=True, slots=True)
class AccountingRecord:
    """One line of sacct: an attempt of a job, or its time at one size."""

    job_id: int
    uid: int
    state: str
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    elapsed_s: int
    gpus: int | None
    """None: the record names no GPUs."""
    energy_j: int | None
    """None: Slurm measured none."""
    directives: Directives | None
    """None: no Pollux job."""


@dataclass(frozen=True, slots=True)
class Usage:
    """A job over all its attempts and companions."""

    job_id: int
    state: str
    submitted_at: float
    ended_at: float | None
    restarts: int
    waited_s: float
    """In the queue, before the first start and between attempts."""
    wall_s: int
    """With GPUs: the attempts' times in sum."""
    companions: int
    companion_gpu_s: int
    gpu_s: int | None
    """With those of companions. None: the records name no GPUs (AccountingStorageTRES lacks gres/gpu)."""
    energy_j: int | None


def read_usage(ask: Callable[..., str], job_id: int) -> Usage | None:
    """Add up what slurmdbd knows of a job; None where it knows no such job.

    Args:
        ask: runs a command of Slurm with SLURM_TIME_FORMAT=%s and in UTC, and returns what it prints.

    Raises:
        SlurmError: no answer, no slurmdbd, or an answer that makes no sense.
    """
    own = of_newest_job(records(ask(*_sacct(f"--jobs={job_id}"))), job_id)
    if not own:
        return None
    first = min(own, key=lambda record: record.submitted_at)
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(first.submitted_at))
    around = records(ask(*_sacct(f"--uid={first.uid}", f"--starttime={since}")))
    return added_up(own, [record for record in around if _lends_to(record, job_id)])


def _sacct(*which: str) -> tuple[str, ...]:
    options = ("--duplicates", "--allocations", "--noheader", "--parsable2", "--noconvert")
    return ("sacct", *options, *which, f"--format={','.join(_FIELDS)}")


def records(text: str) -> list[AccountingRecord]:
    """Read sacct's answer. Raises SlurmGarbled."""
    return [_record(line) for line in text.splitlines() if line.strip()]


def _record(line: str) -> AccountingRecord:
    fields = line.split("|", len(_FIELDS) - 1)
    if len(fields) != len(_FIELDS):
        raise SlurmGarbled(f"expected {len(_FIELDS)} fields from sacct, got {line[:80]!r}")
    job_id, uid, state, submitted, started, ended, elapsed, energy, tres, comment = fields
    try:
        directives = parse_admin_comment(comment)
    except DirectiveError:
        directives = None
    gpus = _GPUS.search(tres)
    begun = _whole(submitted)
    if begun is None:
        raise SlurmGarbled(f"expected a time of submission from sacct, got {submitted[:80]!r}")
    return AccountingRecord(
        job_id=_number(job_id),
        uid=_number(uid),
        state=state.partition(" ")[0],  # "CANCELLED by 1000"
        submitted_at=float(begun),
        started_at=_whole(started),
        ended_at=_whole(ended),
        elapsed_s=_whole(elapsed) or 0,
        gpus=int(gpus[1]) if gpus else None,
        energy_j=_whole(energy) or None,
        directives=directives,
    )


def _whole(text: str) -> int | None:
    """A number; None for `Unknown`, `None` and the like."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def _number(text: str) -> int:
    found = _whole(text)
    if found is None:
        raise SlurmGarbled(f"expected a number from sacct, got {text[:80]!r}")
    return found


def of_newest_job(found: Sequence[AccountingRecord], job_id: int) -> list[AccountingRecord]:
    """The records of the newest job with this id: Slurm uses ids again."""
    mine = [record for record in found if record.job_id == job_id]
    if not mine:
        return []
    last = max(mine, key=lambda record: record.submitted_at)
    return [record for record in mine if _first_submission(record) == _first_submission(last)]


def _first_submission(record: AccountingRecord) -> float | None:
    return record.directives.submitted if record.directives else None


def _lends_to(record: AccountingRecord, job_id: int) -> bool:
    companion = record.directives.companion if record.directives else None
    return companion is not None and companion.parent == job_id


def added_up(own: Sequence[AccountingRecord], companions: Sequence[AccountingRecord]) -> Usage:
    """Add up the records of a job and those of its companions."""
    own = sorted(own, key=lambda record: (record.submitted_at, record.started_at or float("inf")))
    last, everything = own[-1], [*own, *companions]
    queued = {record.submitted_at: record.started_at for record in reversed(own)}
    lent = sum((record.gpus or 0) * record.elapsed_s for record in companions)
    measured = [record.energy_j for record in everything if record.energy_j is not None]
    named = all(record.gpus is not None for record in everything if record.elapsed_s)
    return Usage(
        job_id=last.job_id,
        state=last.state,
        submitted_at=own[0].submitted_at,
        ended_at=last.ended_at,
        restarts=len(queued) - 1,
        waited_s=sum(max(started - asked, 0.0) for asked, started in queued.items() if started is not None),
        wall_s=sum(record.elapsed_s for record in own),
        companions=len({record.job_id for record in companions}),
        companion_gpu_s=lent,
        gpu_s=lent + sum((record.gpus or 0) * record.elapsed_s for record in own) if named else None,
        energy_j=sum(measured) if measured else None,
    )
