"""The report's chapter on mode observe: what polluxd would have done, job by job, against what happened."""

from __future__ import annotations

import pytest

from polluxd.site_report.job_log import read
from polluxd.site_report.shadow import chapter, lines

from .shadow_site import LOG, snapshots
from .site_text import written


def test_each_job_has_what_happened_beside_what_was_decided(tmp_path):
    found = chapter(snapshots(), read(written(tmp_path / "log", LOG)))
    rows = {row["job_id"]: row for row in found["jobs"]}
    assert rows[1]["held_gpu_hours"] == pytest.approx(1 * 1200 / 3600)
    assert rows[2]["held_gpu_hours"] == pytest.approx(4 * 600 / 3600)
    assert rows[2]["decided_gpu_hours"] > rows[2]["held_gpu_hours"], "polluxd would not have let it wait"
    assert (rows[2]["waited_s"], rows[2]["decided_wait_s"]) == (900.0, 300.0)
    assert rows[1]["decided_wait_s"] is None, "it was never seen waiting"
    assert (rows[1]["user"], rows[1]["state"]) == ("ann", "COMPLETED")
    assert (rows[99]["name"], rows[99]["waited_s"], rows[99]["hours"]) == ("", None, pytest.approx(1 / 6))
    assert found["gained_h"] == pytest.approx(
        sum(row["decided_h"] - row["trained_h"] for row in rows.values())
    )
    assert found["gained_h"] > 0
    assert (found["hours"], found["error_h"]) == (pytest.approx(1 / 3), None)
    (said,) = lines(found)
    assert "3 jobs" in said
    assert "too few decisions for an error" in said


def test_without_decisions_it_says_so(tmp_path):
    found = chapter([], read(written(tmp_path / "log", LOG)))
    assert lines(found) == ["In the shadow: no decisions of mode observe with their snapshots in this period"]
    assert lines(None) == []
