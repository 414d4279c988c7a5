"""Decisions recorded in a real Postgres are replayed bit for bit."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams
from polluxd.cli.decisions import differences
from polluxd.cli.settings import preview
from polluxd.config.settings import PolicySettings
from polluxd.model import DaemonMode, JobSpec, Node, Placement, Report, Snapshot, SnapshotJob
from polluxd.model.snapshot_json import decode_snapshot, encode
from polluxd.policy import Cache, decide
from polluxd.store import Store

pytestmark = pytest.mark.slurm

CLUSTER = "replay"
POLLUXCTL = Path(sys.executable).with_name("polluxctl")


def lived_through(seed: int) -> Snapshot:
    """Return a busy cluster whose numbers use all digits."""
    draw = random.Random(seed)
    nodes = tuple(
        Node(f"n{i}", 4, "", draw.choice([0, 0, 1]), draw.random() < 0.95, frozenset({"main"}), 64)
        for i in range(8)
    )
    free = {n.name: n.capacity for n in nodes}
    jobs = []
    for number in range(1, draw.randint(6, 24)):
        place = Placement()
        node = draw.choice(nodes).name
        if draw.random() < 0.5 and free[node]:
            place = Placement((node,), draw.randint(1, free[node]))
            free[node] -= place.gpus
        theta = ThroughputParams(*(draw.lognormvariate(-4, 1.5) for _ in range(6)), draw.uniform(1, 5))
        noise = NoiseScale(draw.lognormvariate(0, 1), draw.lognormvariate(2, 2))
        report = Report(
            *(0, 1e9, BatchLimits(64, 64 * 256, 8, 512), theta, draw.choice([None, noise])),
            explored_gpus=draw.choice([1, 2, 4, 16]),
            explored_nodes=1,
            progress=draw.uniform(0, 900),
            target=1000.0,
        )
        jobs.append(
            SnapshotJob(
                *(number, f"job{number}", draw.choice("ab"), draw.choice(["vision", "nlp"]), "main"),
                JobSpec(
                    max_gpus=draw.choice([None, 8]), gpu_counts=draw.choice(["any", "powers-of-two", "1,3"])
                ),
                1e9 - 5000 * draw.random(),
                5000 * draw.random(),
                place,
                report if draw.random() < 0.9 else None,
                started=bool(place),
                lost_seconds=100 * draw.random(),
                move_cost=30 * draw.random(),
            )
        )
    settings = PolicySettings(
        power=draw.choice([-1.0, 1.0, 0.0, -3.3, -math.inf]),
        account_weights={"vision": 0.1 + 0.2},
        account_ceilings=draw.choice([{}, {"nlp": 7}]),
        user_guarantees=draw.choice([{}, {"a": 3}]),
        starvation_bound=draw.choice([None, 1234.5]),
        remaining_work_power=draw.choice([0.0, -0.25]),
    )
    return Snapshot(CLUSTER, 1e9 + draw.random(), nodes, tuple(jobs), settings)


@pytest.fixture(scope="module")
def store(dev_postgres):
    made = Store(dev_postgres.url, CLUSTER)
    made.migrate()
    assert made.lead() is not None
    yield made
    made.close()


def record(store: Store, snapshot: Snapshot, cache: Cache | None = None) -> int:
    return store.record_cycle(
        decide(snapshot, cache=cache),
        mode=DaemonMode.ENFORCE,
        durations={"decide_s": 0.01},
        started_at=time.time(),
        snapshot_json=lambda: json.dumps(encode(snapshot)),
    )


@pytest.fixture
def polluxctl(store, dev_postgres, tmp_path):
    path = tmp_path / "polluxd.toml"
    path.write_text(f'[slurm]\ncluster = "{CLUSTER}"\n[database]\nurl = "{dev_postgres.url}"\n')
    path.chmod(0o600)
    env = os.environ | {"POLLUXD_CONFIG": str(path), "PYTHONHASHSEED": "random"}
    env.pop("COLUMNS", None)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(POLLUXCTL), *words], capture_output=True, text=True, check=False, env=env, timeout=120
        )

    return run


def test_every_recorded_decision_can_be_made_again(store):
    """The replay begins without the tables that polluxd keeps."""
    kept = Cache()
    for seed in range(30):
        cycle = record(store, lived_through(seed), kept)
        view = store.cycle(cycle)
        assert view is not None
        again = decide(decode_snapshot(store.cycle_snapshot(cycle)))
        made = store.allocations(cycle, made_in_it=True)
        assert differences(view, store.allocations(cycle), again, made) == [], seed


def test_another_process_makes_the_same_decision(store, polluxctl):
    cycle = record(store, lived_through(99))
    done = polluxctl("decisions", "replay", str(cycle), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["identical"] is True
    newest = json.loads(polluxctl("decisions", "list", "-n", "1", "--json").stdout)
    assert [(row["cycle"], row["replayable"]) for row in newest] == [(cycle, True)]


def test_a_snapshot_that_is_not_the_one_is_found_out(store):
    cycle = record(store, lived_through(7))
    view = store.cycle(cycle)
    data = store.cycle_snapshot(cycle)
    running = next(
        a
        for a in store.allocations(cycle)
        if a.placement and data["jobs"][a.job_id - 1]["report"] is not None
    )
    theta = data["jobs"][running.job_id - 1]["report"]["params"]
    theta["alpha_grad"] *= 1.5
    found = differences(view, store.allocations(cycle), decide(decode_snapshot(data)))
    assert (running.job_id, "goodput") in {(d["job_id"], d["what"]) for d in found}


def test_a_pruned_snapshot_is_said_in_one_line(store, polluxctl):
    cycle = record(store, lived_through(3))
    record(store, lived_through(4))
    store.prune(time.time() + 10, history_s=1e6, snapshots_s=0.0, jobs_s=1e6)
    done = polluxctl("decisions", "replay", str(cycle))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"polluxctl: the snapshot of cycle {cycle} is not kept any more")
    assert done.stderr.count("\n") == 1


def test_a_preview_changes_nothing(store, polluxctl):
    snapshot = lived_through(11)
    cycle = record(store, snapshot)
    done = polluxctl("settings", "preview", "--power", "1", "--account-weight", "vision=4", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    now = PolicySettings()  # nothing is set in the database: the configuration's defaults hold
    rows, _ = preview(snapshot, now, replace(now, power=1.0, account_weights={"vision": 4.0}))
    assert found["cycle"] == cycle
    assert found["jobs"] == rows
    assert store.settings() == PolicySettings()
    assert store.setting_audit() == []


def test_the_wider_settings_are_kept(store, polluxctl):
    words = ("--account-ceiling", "vision=8", "--user-guarantee", "a=2", "--gpu-counts", "powers-of-two")
    more = ("--starvation-bound", "3600", "--remaining-work-power", "-0.25", "--hysteresis", "0.1")
    done = polluxctl("settings", "set", *words, *more)
    assert done.returncode == 0, done.stderr
    assert store.settings() == PolicySettings(
        account_ceilings={"vision": 8},
        user_guarantees={"a": 2},
        gpu_counts="powers-of-two",
        starvation_bound=3600.0,
        remaining_work_power=-0.25,
        hysteresis=0.1,
    )
    assert len(store.setting_audit()) == 6
    refused = polluxctl("settings", "set", "--user-ceiling", "a=1")
    assert refused.returncode == 2
    assert "user_guarantees.a (2) must not be above user_ceilings.a (1)" in refused.stderr
