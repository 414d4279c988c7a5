"""polluxctl as a command, on a real Postgres."""

from __future__ import annotations

import json
import os
import subprocess
import time

import pytest

from polluxd.model import Allocation, Placement, Plan, Step
from tests.integration.store.slurm_job import seen

from .conftest import POLLUXCTL

pytestmark = pytest.mark.slurm

CLUSTER = "ctl"


@pytest.fixture(scope="module")
def store(store):
    """With a job, a decision and a move."""
    job = seen(
        11, name="resnet", user="ada", account="vision", partition="main", gpus_per_node_held={"n1": 2}
    )
    store.sync_jobs([job])
    placed = Allocation(11, Placement(("n1",), 2), 200.0, 1.5, 64, True, "grows from 1 to 2 GPUs")
    plan = Plan((placed,), 0.5, 0.5, "counts")
    store.record_cycle(plan, mode="enforce", durations={"decide_s": 0.01}, started_at=time.time())
    places = Placement(("n1",), 1), Placement(("n1",), 2)
    move = store.plan_move(11, 0, "requeue", *places, "grows", store.epoch)
    for step in (
        Step.DRAINING,
        Step.CHECKPOINTED,
        Step.REQUEUED,
        Step.CONFIGURED,
        Step.STARTED,
        Step.TRAINING,
    ):
        assert store.advance(move.id, step, time.time(), epoch=store.epoch)
    return store


def test_jobs_explain_and_moves_of_a_real_database(polluxctl):
    (job,) = json.loads(polluxctl("jobs", "--json").stdout)
    assert (job["job_id"], job["gpus"], job["speedup"], job["moves"]) == (11, 2, None, 1)
    told = polluxctl("explain", "11")
    assert told.returncode == 0, told.stderr
    assert "grows from 1 to 2 GPUs" in told.stdout
    (move,) = json.loads(polluxctl("moves", "--json").stdout)
    assert (move["from"], move["to"], move["step"]) == ("n1:1", "n1:2", "training")
    assert move["total_s"] >= 0
    status = json.loads(polluxctl("status", "--json").stdout)
    assert status["leading"] is True
    assert status["mode"] == "enforce"


def test_settings_and_pause_are_kept_and_audited(polluxctl, store):
    done = polluxctl("settings", "set", "-p", "-inf", "--account-weight", "vision=2", SUDO_USER="grace")
    assert done.returncode == 0, done.stderr
    assert store.settings().power == float("-inf")
    assert store.settings().account_weights == {"vision": 2.0}
    assert polluxctl("pause").returncode == 0
    assert store.settings().paused is True
    assert polluxctl("resume").returncode == 0
    changes = json.loads(polluxctl("audit", "--json").stdout)
    assert [c["name"] for c in changes] == ["paused", "paused", "account_weights", "power"]
    assert changes[-1]["who"].startswith("grace@")


def one_line(done, status):
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("polluxctl: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_wrong_password_is_one_line_without_the_password(polluxctl, config, dev_postgres):
    text = config.read_text()
    secret = text.split("pollux_daemon:")[1].split("@")[0]
    config.write_text(text.replace(secret, "not-the-password"))
    told = one_line(polluxctl("jobs"), 1)
    assert "not-the-password" not in told


def test_a_reader_that_goes_away_is_no_error(config):
    command = f"'{POLLUXCTL}' jobs | true"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"POLLUXD_CONFIG": str(config)},
    )
    assert done.stderr == ""
