"""Decisions of a live polluxd, replayed, explained and varied.

The tests replay each decision, explain it, and repeat it under other settings.
"""

from __future__ import annotations

import json

import pytest

from .conftest import Loop

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def test_decisions_of_a_living_polluxd_can_be_replayed_explained_and_tried_otherwise(loop: Loop) -> None:
    audit = loop.store.setting_audit()
    job_id = loop.train("explained", 300, directive="#POLLUX max-gpus=2 gpu-counts=2,1")
    loop.until(
        lambda: any(m.path == "requeue" and m.step.terminal for m in loop.store.moves(job_id)),
        why="a move",
    )
    listed = json.loads(loop.daemon.command("polluxctl", "decisions", "list", "--json").stdout)
    replayable = [row["cycle"] for row in listed if row["jobs"] and row["replayable"]]
    moving = [row["cycle"] for row in listed if row["changed"]]
    assert moving
    for cycle in {*moving, *replayable[:2]}:
        done = loop.daemon.command("polluxctl", "decisions", "replay", str(cycle))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "the same plan, bit for bit" in done.stdout

    told = loop.daemon.command("polluxctl", "explain", str(job_id)).stdout
    for part in ("Fair share: ", "Limit: ", "A move would cost about "):
        assert part in told

    words = ("settings", "preview", "--user-ceiling", f"{loop.job(job_id).user}=1", "--json")
    tried = loop.daemon.command("polluxctl", *words)
    assert tried.returncode == 0, tried.stderr
    (row,) = (r for r in json.loads(tried.stdout)["jobs"] if r["job_id"] == job_id)
    assert row["gpus_before"] == loop.job(job_id).spec.max_gpus == 2
    assert loop.job(job_id).spec.gpu_counts == "1,2"
    assert loop.store.setting_audit() == audit
