"""The simulator's benchmark keeps the runs that are still good."""

from __future__ import annotations

import json

from polluxd.sim.cluster import Scenario
from tests.benchmarks import simulator_runs
from tests.benchmarks.simulator_runs import OURS, SILENT, Bench, digest


def test_only_runs_of_the_sources_that_a_policy_uses_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(
        simulator_runs, "SOURCES", ("polluxd/policy/market.py", "polluxd/policy/objective.py")
    )
    kept = tmp_path / "runs.json"
    bench = Bench(tmp_path, kept)
    for policy in ("pollux", "sia"):
        assert bench.of(policy, ["short-1"], Scenario()) == [None]
    ours, theirs = bench.tasks
    kept.write_text(
        json.dumps(
            {
                ours: {"version": digest(tmp_path), "avg_jct_s": 1.0},
                theirs: {"version": digest(tmp_path, (*SILENT, *OURS)), "avg_jct_s": 2.0},
            }
        )
    )
    assert set(Bench(tmp_path, kept).done) == {ours, theirs}
    changed = {"market.py": b"changed"}
    read = simulator_runs.code_of
    monkeypatch.setattr(simulator_runs, "code_of", lambda path: changed.get(path.name) or read(path))
    assert set(Bench(tmp_path, kept).done) == {theirs}
    changed["objective.py"] = b"changed"
    assert not Bench(tmp_path, kept).done
