"""Decisions recorded in a real Postgres are replayed bit for bit."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from polluxd.cli.decisions import differences
from polluxd.model import DaemonMode, Snapshot
from polluxd.model.snapshot_json import decode_snapshot, encode
from polluxd.policy import Cache, decide
from polluxd.store import Store
from tests.unit.policy.scenarios import random_snapshot

pytestmark = pytest.mark.slurm

CLUSTER = "replay"


def record(store: Store, snapshot: Snapshot, cache: Cache | None = None) -> int:
    return store.record_cycle(
        decide(snapshot, cache=cache),
        mode=DaemonMode.ENFORCE,
        durations={"decide_s": 0.01},
        started_at=time.time(),
        snapshot_json=lambda: json.dumps(encode(snapshot)),
    )


def test_every_recorded_decision_can_be_made_again(store):
    """The replay begins without the tables that polluxd keeps."""
    kept = Cache()
    for seed in range(30):
        snapshot = random_snapshot(seed, jobs=12, count=8)
        objective = ("completion-time", "fair-share")[seed % 2]
        settings = replace(snapshot.settings, objective=objective, account_weights={"big": 0.1 + 0.2})
        cycle = record(store, replace(snapshot, settings=settings), kept)
        view = store.cycle(cycle)
        assert view is not None
        again = decide(decode_snapshot(store.cycle_snapshot(cycle)))
        made = store.allocations(cycle, made_in_it=True)
        assert differences(view, store.allocations(cycle), again, made) == [], seed


def test_another_process_makes_the_same_decision(store, polluxctl):
    cycle = record(store, random_snapshot(99, jobs=12, count=8))
    done = polluxctl("decisions", "replay", str(cycle), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["identical"] is True
    newest = json.loads(polluxctl("decisions", "list", "-n", "1", "--json").stdout)
    assert [(row["cycle"], row["replayable"]) for row in newest] == [(cycle, True)]
