"""The newest report of each job, read and checked once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pollux.parameters import ThroughputParams
from polluxd.errors import ReportError
from polluxd.model import Report

from . import rows

log = logging.getLogger(__name__)

_AT_ONCE = 1000
"""Rows in memory at a time: one takes twenty times the memory of its report."""


class _Newest(NamedTuple):
    """The version of a usable report: as long as it is the same, so is the report."""

    id: int
    """A report is never changed, and its id is never used again."""
    drained: bool
    """An acknowledged drain says that a checkpoint exists."""
    known_gpus: int
    known_nodes: int


class _Usable(NamedTuple):
    """A usable report."""

    of: _Newest
    report: Report
    """Without fits for other GPU types."""
    fits: Mapping[str, ThroughputParams]
    """By GPU type."""
    with_types: Report


Run = Callable[..., list[dict[str, Any]]]
"""Runs a named query."""


class NewestReports:
    """Reads rows of reports that are new, and keeps the others' values."""

    def __init__(self) -> None:
        self._usable: dict[int, _Usable] = {}
        self.rejected: dict[int, str] = {}
        """Jobs whose report the last `read` left out, and why."""

    def read(self, run: Run) -> dict[int, Report]:
        """Return the usable reports by job."""
        newest = {
            row["job_id"]: _Newest(row["id"], row["drained"], row["known_gpus"], row["known_nodes"])
            for row in run("newest_reports")
        }
        fits = rows.fits_by_type(run("fits_by_type"))
        before, rejected = self._usable, dict[int, str]()
        usable = {
            job_id: before[job_id]
            for job_id, of in newest.items()
            if job_id in before and before[job_id].of == of
        }
        new = [of.id for job_id, of in newest.items() if job_id not in usable]
        for row in _in_turn(run, new):
            job_id = row["job_id"]
            of = newest[job_id]
            try:
                report = rows.report(row | of._asdict())
            except ReportError as error:
                rejected[job_id] = str(error)
                if self.rejected.get(job_id) != str(error):
                    log.warning("report left out: %s", error)
                continue
            usable[job_id] = _Usable(of, report, {}, report)
        for job_id, known in usable.items():
            mine = fits.get(job_id, {})
            if known.fits != mine:
                typed = rows.with_types(known.report, mine)
                usable[job_id] = known._replace(fits=mine, with_types=typed)
        self._usable, self.rejected = usable, rejected
        return {job_id: known.with_types for job_id, known in usable.items()}


def _in_turn(run: Run, ids: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of the reports with these ids."""
    for first in range(0, len(ids), _AT_ONCE):
        yield from run("reports", ids=ids[first : first + _AT_ONCE])
