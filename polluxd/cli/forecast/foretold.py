"""What is foretold of a job, in words: `polluxctl explain`, `jobs` and the live page."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from polluxd.cli.output import count

FRESH_S = 1800.0
"""An older forecast is not shown: the cluster has changed since."""
BY = {
    "declared": "its length as it declares it, corrected by what its user's ended jobs declared",
    "name": "the steps of its user's ended jobs of this name",
    "user": "the time that its user's ended jobs took",
    "all": "the time that all ended jobs took, since its user's are too few",
}
"""What a length goes by."""
SILENT = (
    "polluxd cannot tell when it ends: it declares no length, and fewer than three jobs have ended by which to go, or "
    "it has run for longer than each of them"
)

Document = Mapping[str, Any]


def of_jobs(documents: Sequence[Document], now: float) -> dict[int, Mapping[str, Any]]:
    """Return what the newest document foretells, by job; nothing where it is old."""
    if not documents or now - documents[0]["at"] > FRESH_S:
        return {}
    return {each["job_id"]: each for each in documents[0]["jobs"]}


def row(each: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Return the members of a job's row; times are POSIX seconds."""
    told = {} if each is None else each["told"]
    return {"starts_by": told.get("starts"), "ends_from": told.get("first"), "ends_by": told.get("last")}


def when(at: float | None, now: float | None = None) -> str:
    """A local time: of another day with its date."""
    if at is None:
        return "-"
    moment = datetime.fromtimestamp(at)
    here = moment.date() == datetime.fromtimestamp(time.time() if now is None else now).date()
    return moment.strftime("%H:%M" if here else "%a %d %b %H:%M")


def sentence(documents: Sequence[Document], job: int, now: float) -> str:
    """Say when a job starts and ends, and how this was obtained; empty where no forecast was ever made."""
    if not documents:
        return ""
    newest = documents[0]
    each = of_jobs(documents, now).get(job)
    if each is None:
        if now - newest["at"] > FRESH_S:
            return f"The last forecast was made at {when(newest['at'], now)}, and none since."
        return "There is no forecast of it yet: polluxd makes one every few minutes, of at most 400 jobs."
    found = row(each)
    parts = []
    if found["starts_by"] is not None:
        parts.append(f"starts by {when(found['starts_by'], now)}")
    if found["ends_from"] is not None and found["ends_by"] is not None:
        parts.append(f"ends between {when(found['ends_from'], now)} and {when(found['ends_by'], now)}")
    elif found["ends_from"] is not None:
        parts.append(
            f"ends after {when(found['ends_from'], now)}, and maybe later than the forecast looks ahead"
        )
    silent = f"{SILENT}." if not each["by"] else ""
    if not parts:
        return silent or "No forecast: in too few courses did it get GPUs."
    how = how_made(newest, each, now)
    return f"It {', '.join(parts)} (80 %). {silent}{' ' if silent else ''}{how}"


def how_made(document: Document, each: Mapping[str, Any], now: float) -> str:
    """Say how the figures of a job were obtained."""
    length = f"; length: {BY[each['by']]}" if each["by"] else ""
    checked = (
        f"moved by what the forecasts of {count(each['checked'], 'ended job')} missed"
        if each["checked"]
        else "not yet checked against what happened: too few forecast jobs have ended"
    )
    return (
        f"This comes from {document['courses']} courses of the cluster from the decision at "
        f"{when(document['at'], now)}, with arrivals as in the last {document['days']:g} days{length}; {checked}."
    )
