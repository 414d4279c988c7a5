"""One leader at a time, whatever happens to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm


def end_sessions(postgres, database="pollux"):
    postgres.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        f" WHERE datname = '{database}' AND pid <> pg_backend_pid()"
    )


def lead_within(store, seconds):
    deadline = time.monotonic() + seconds
    while (epoch := store.lead()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return epoch


def test_only_one_leads_and_epochs_grow(new_store):
    first, second = new_store(lease_s=90), new_store(lease_s=90)
    epoch = first.lead()
    assert second.lead() is None
    assert first.lead() == epoch
    assert first.still_leading()
    assert not second.still_leading()
    first.resign()
    assert not first.still_leading()
    assert second.lead() == epoch + 1
    assert second.leader().epoch == epoch + 1


def test_a_leader_says_why_it_takes_no_action_without_a_row(new_store, cluster):
    leader, reader = new_store(lease_s=30), new_store(lease_s=30)
    assert leader.lead() is not None
    assert reader.leader().trouble == ""
    leader.tell("database_error")
    assert reader.leader().trouble == "database_error"
    other = new_store(name=f"{cluster}-2", lease_s=30)
    assert other.lead() is not None
    assert other.leader().trouble == "", "another cluster of the same database"
    leader.tell("")
    assert reader.leader().trouble == ""
    leader.tell("slurm_error")
    leader.resign()
    assert reader.lead() is not None
    assert reader.leader().trouble == "", "the words of the leader before"
    leader.tell("fault")  # nothing to say it over, and no error


def test_of_many_that_try_at_once_one_leads(new_store):
    stores = [new_store(lease_s=30) for _ in range(6)]
    gate = threading.Barrier(len(stores))

    def run(store):
        gate.wait()
        return store.lead()

    with ThreadPoolExecutor(len(stores)) as pool:
        epochs = list(pool.map(run, stores))
    assert sorted(e for e in epochs if e is not None) == [1]


def test_a_leader_whose_session_dies_asks_again_and_leads_on(new_store, postgres):
    first, second = new_store(lease_s=30), new_store(lease_s=30)
    epoch = first.lead()
    end_sessions(postgres)  # as a network that drops the leader's connection
    first.still_leading()  # the session's death may show here
    assert first.still_leading()
    assert first.lead() == epoch
    assert second.lead() is None


def test_the_lease_is_renewed_through_a_long_cycle(new_store):
    leader, standby = new_store(lease_s=5), new_store(lease_s=5)
    epoch = leader.lead()
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline:  # the leader's main thread is busy elsewhere
        assert standby.lead() is None
        time.sleep(0.1)
    assert leader.lease_left > 0
    assert leader.still_leading()
    assert leader.epoch == epoch


def test_a_leader_that_resigned_renews_nothing(new_store):
    leader, standby = new_store(lease_s=0.6), new_store(lease_s=0.6)
    leader.lead()
    leader.resign()
    assert standby.lead() == 2
    time.sleep(1.0)
    assert (leader.epoch, leader.lease_left) == (None, 0.0)
    assert standby.still_leading()


def test_a_standby_that_never_led_is_not_fenced_out_of_reading(new_store):
    leader, standby = new_store(), new_store()
    leader.lead()
    assert standby.open_moves() == []
    assert standby.epoch is None


LEADER = """
import sys, time
from polluxd.errors import LeaderLost
from polluxd.model import NO_PLACEMENT, Placement
from polluxd.store import Store

store = Store(sys.argv[1], sys.argv[2], lease_s=5)
epoch = store.lead()
print("epoch", epoch, flush=True)
while store.still_leading():
    time.sleep(0.05)
print("lost", store.lease_left, flush=True)
try:
    store.plan_move(7, 0, "start", NO_PLACEMENT, Placement(("n1",), 1), "late", epoch)
except LeaderLost:
    print("fenced", flush=True)
"""


@pytest.fixture
def leader(postgres, cluster):
    """Another process that leads and renews its lease."""
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER, postgres.url, cluster],
        env={**os.environ, "PYTHONPATH": f"{root}:{root / 'agent'}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "epoch 1\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_killed_leader_is_replaced(leader, new_store):
    standby = new_store(lease_s=5)
    assert standby.lead() is None
    leader.kill()
    assert lead_within(standby, 60) == 2


def test_a_stalled_leader_is_replaced_and_does_nothing_on_waking(leader, new_store):
    """Its connection stays open while it is stopped."""
    standby = new_store(lease_s=5)
    assert standby.lead() is None
    leader.send_signal(signal.SIGSTOP)
    assert lead_within(standby, 60) == 2
    leader.send_signal(signal.SIGCONT)
    assert leader.stdout.read() == "lost 0.0\nfenced\n"
    assert standby.still_leading()
    assert standby.moves() == []


def test_a_leader_whose_lease_runs_is_not_evicted(leader, new_store):
    standby = new_store(lease_s=5)
    for _ in range(30):
        assert standby.lead() is None
        time.sleep(0.05)
    assert leader.poll() is None
