"""Reports are read once, and never for the wrong job."""

from __future__ import annotations

from typing import Any

import pytest

from pollux.parameters import ThroughputParams
from polluxd.store.newest_reports import NewestReports
from tests.build import report_row

FIT = dict(zip(ThroughputParams._fields[:7], (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 1.5), strict=True))


def row(id: int, job_id: int, **other: Any) -> dict[str, Any]:
    return report_row(id=id, job_id=job_id, params=FIT, **other)


class Tables:
    """Rows of the two tables, and what was asked of them."""

    def __init__(self) -> None:
        self.newest: dict[int, dict[str, Any]] = {}
        self.others: list[dict[str, Any]] = []
        self.asked: list[list[int]] = []

    def show(self, *rows: dict[str, Any], drained: bool = False, known: int = 2) -> None:
        extra = {"drained": drained, "known_gpus": known, "known_nodes": known}
        self.newest = {r["id"]: r | extra for r in rows}

    def __call__(self, query: str, /, **words: Any) -> list[dict[str, Any]]:
        if query == "fits_by_type":
            return self.others
        if query == "newest_reports":
            names = ("job_id", "id", "drained", "known_gpus", "known_nodes")
            return [{name: r[name] for name in names} for r in self.newest.values()]
        self.asked.append(words["ids"])
        hidden = ("drained", "known_gpus", "known_nodes")
        return [
            {k: v for k, v in self.newest[id].items() if k not in hidden}
            for id in words["ids"]
            if id in self.newest
        ]


@pytest.fixture
def tables() -> Tables:
    return Tables()


def test_only_new_reports_are_read(tables: Tables) -> None:
    reports = NewestReports()
    tables.show(row(1, 7), row(2, 8))
    first = reports.read(tables)
    tables.show(row(1, 7), row(3, 8, goodput=5.0))
    second = reports.read(tables)
    assert tables.asked == [[1, 2], [3]]
    assert second[7] is first[7]
    assert (first[8].goodput, second[8].goodput) == (1.0, 5.0)
    tables.show(row(3, 8))
    assert set(reports.read(tables)) == {8}, "job 7 has ended"
    tables.show(row(9, 7, attempt=0, goodput=6.0))
    assert reports.read(tables)[7].goodput == 6.0, "Slurm used the id of job 7 again"


def test_what_is_known_beside_the_report_counts_at_once(tables: Tables) -> None:
    reports = NewestReports()
    tables.show(row(1, 7))
    assert not reports.read(tables)[7].checkpointed
    tables.show(row(1, 7), drained=True, known=1)
    told = reports.read(tables)[7]
    assert (told.checkpointed, told.prior_gpus) == (True, 1)
    tables.others = [{"job_id": 7, "gpu_type": "a100", "params": FIT}]
    assert set(reports.read(tables)[7].params_by_type) == {"a100"}
    tables.others = []
    assert reports.read(tables)[7].params_by_type == {}


def test_an_unusable_report_is_left_out_until_it_is_usable(
    tables: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    reports = NewestReports()
    tables.show(row(1, 7, limits={"initial": 32, "maximum": 4, "local_min": 1, "local_max": 32}), row(2, 8))
    for _ in range(2):
        assert set(reports.read(tables)) == {8}
        assert "batch size" in reports.rejected[7]
    assert len(caplog.records) == 1
    tables.show(row(3, 7))
    assert 7 in reports.read(tables)
    assert reports.rejected == {}
