"""The control cycle: what it says of records of Slurm that make no sense."""

from __future__ import annotations

import io
import json
import logging
from dataclasses import replace

import pytest

from polluxd.logs import JsonFormatter
from polluxd.model import JobSpec, JobState, Placement, Step
from polluxd.model.snapshot_json import decode_snapshot, encode
from polluxd.policy import decide
from polluxd.slurm.protocol import ClusterState
from tests.unit.cycle.two_gpu_types import REPORT, Cycle


def test_records_that_make_no_sense_are_named_in_the_log_once_and_in_the_note(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cycle = Cycle()
    unreadable = {f"job {i}": "expected UserID as a number, got 'x'" for i in range(1, 8)}
    observe = cycle.slurm.observe

    def garbled() -> ClusterState:
        return replace(observe(), unreadable=unreadable)

    monkeypatch.setattr(cycle.slurm, "observe", garbled)
    cycle.step()
    note = cycle.rows.note
    cycle.step()
    named = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(named) == 7
    assert "leaves job 3 alone" in named[2]
    assert "expected UserID" in named[2]
    assert note == cycle.rows.note
    assert "job 5: expected UserID" in note
    assert note.endswith("and 2 more")
    unreadable.clear()
    cycle.step()
    assert cycle.rows.note == ""


def test_a_doubted_report_is_named_and_replayed() -> None:
    cycle = Cycle()
    liar, honest = (cycle.slurm.submit(JobSpec(max_gpus=4), lease=1e6) for _ in range(2))
    cycle.rows.reports[liar] = replace(REPORT, at=1.0, explored_gpus=10**6)
    cycle.rows.reports[honest] = replace(REPORT, at=1.0, explored_gpus=0, explored_nodes=0)
    snapshot, plan = cycle.step()
    told = plan.of(liar)
    assert "; polluxd does not believe these claims of its report: explored_gpus=1000000" in told.reason
    assert len(told.explanation.doubts) == 1
    assert "believe" not in plan.of(honest).reason
    stored = decode_snapshot(json.loads(json.dumps(encode(snapshot))))
    assert decide(stored) == plan, "a replay has the doubts as well"


def test_all_lines_of_a_move_name_the_cycle_that_decided_on_it() -> None:
    cycle = Cycle("enforce")
    job = cycle.slurm.submit(JobSpec(max_gpus=4), lease=1e6)
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter())
    log = logging.getLogger("polluxd")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        cycle.step()
        first = cycle.rows.cycles
        cycle.step()
        cycle.step()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert lines[0]["message"].startswith("cycle: ")
    assert lines[0]["cycle"] == first
    move = cycle.rows.moves[0].id
    of_move = [line for line in lines if line.get("move") == move]
    assert {line["logger"] for line in of_move} == {"polluxd.cycle.controller", "polluxd.apply.reconciler"}
    assert {(line["cycle"], line["job"]) for line in of_move} == {(first, job)}
    assert cycle.rows.cycles > first


def test_a_job_whose_mark_is_overwritten_has_not_ended_and_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cycle = Cycle()
    job, other = (cycle.slurm.submit(JobSpec(max_gpus=4), lease=1e6) for _ in range(2))
    observe, overwritten = cycle.slurm.observe, {job}

    def seen() -> ClusterState:
        state = observe()
        bare = [
            replace(j, spec=None, admin_comment="x") if j.job_id in overwritten else j for j in state.jobs
        ]
        return replace(state, jobs=tuple(bare))

    cycle.step()
    monkeypatch.setattr(cycle.slurm, "observe", seen)
    snapshot, _ = cycle.step()
    cycle.step()
    assert [one.job_id for one in snapshot.jobs] == [other], "it looks like a plain job"
    assert set(cycle.rows.jobs) == {job, other}, "it has not ended"
    errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert len(errors) == 1
    assert f"scontrol update JobId={job} AdminComment='pollux:v1'" in errors[0]
    assert cycle.rows.note.endswith(f"jobs {job}")
    overwritten.clear()
    cycle.step()
    assert cycle.rows.note == ""
    overwritten.add(job)
    cycle.slurm.finish(job)
    cycle.step()
    assert job not in cycle.rows.jobs, "it has ended"


@pytest.mark.parametrize(("mode", "managed"), [("enforce", {"bea"}), ("observe", {"alice", "bea"})])
def test_jobs_outside_of_the_scope_are_left_to_slurm_in_mode_enforce(mode: str, managed: set[str]) -> None:
    cycle = Cycle(mode, users=("bea",))
    jobs = {user: cycle.slurm.submit(JobSpec(max_gpus=2), user=user, lease=1e6) for user in ("alice", "bea")}
    snapshot, _ = cycle.step()
    assert {one.user for one in snapshot.jobs} == managed
    assert set(cycle.rows.jobs) == set(jobs.values()), "the store knows all of them"
    assert {call for call in cycle.slurm.calls if call[1] == jobs["alice"]} == (
        {("renew", jobs["alice"])} if mode == "enforce" else set()
    )
    cycle.slurm.advance(5.0)
    assert (cycle.slurm.truth(jobs["alice"]).state is JobState.RUNNING) is (mode == "enforce")


@pytest.mark.parametrize(
    "grown_by", ["hold", "silence", "directive", "hold once asked", "excuse once asked", "rhythm"]
)
def test_no_user_keeps_others_waiting_beyond_the_equal_share(grown_by: str) -> None:
    """Its agent answers no order: after one of them it is requeued."""
    cycle = Cycle("enforce")
    spec = JobSpec(preemptible=grown_by != "directive")
    grown = cycle.running(Placement(("n1", "n2"), 4), spec, uid=1)
    cycle.slurm.submit(None, gpus_per_node=4, user="cem", uid=3)
    cycle.slurm.advance(3.0)
    stepped = replace(REPORT, first_step_at=1.0, gpus=8, nodes=2)
    cycle.rows.reports[grown] = replace(stepped, attempt=1) if grown_by == "silence" else stepped
    if grown_by == "hold":
        cycle.slurm.hold(grown)
    for _ in range(4):
        cycle.step()
    assert cycle.slurm.truth(grown).gpus_per_node_held == {"n1": 4, "n2": 4}, "nobody lacks GPUs"
    other = cycle.slurm.submit(JobSpec(max_gpus=1), lease=1e6, user="bob", uid=2)
    for _ in range(200):
        cycle.slurm.advance(3.0)
        asked = any(move.job_id == grown and not move.step.terminal for move in cycle.rows.moves)
        if grown_by == "hold once asked":
            cycle.slurm.hold(grown, asked)
        elif grown_by == "excuse once asked":
            cycle.rows.reports[grown] = replace(stepped, immovable="the disk is full" if asked else "")
        elif grown_by == "rhythm":
            cycle.rows.reports[grown] = replace(stepped, at=cycle.slurm.clock(), next_save_s=3599.0)
        cycle.controller.step()
    assert cycle.slurm.truth(other).state is JobState.RUNNING, cycle.seen[-1][1].of(grown).reason
    assert sum(cycle.slurm.truth(grown).gpus_per_node_held.values()) <= 6
    drains = [move for move in cycle.rows.moves if move.job_id == grown and Step.DRAINING in move.times]
    assert drains
    assert cycle.slurm.truth(grown).restart_count <= 1
