"""The cost of a move from its stamps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polluxd.model import NO_PLACEMENT, Placement
from polluxd.store.costs import cost_of, is_move, totals

N1 = Placement(("n1",), 4)


def row(times, acknowledged=None, resumed=None, path="requeue"):
    return {
        **{"id": 1, "job_id": 7, "path": path},
        **{"times": times, "acknowledged": acknowledged, "resumed": resumed},
    }


def cost(*args, **words):
    return cost_of(row(*args, **words), N1, N1)


def test_without_stamps_of_the_agent_it_runs_from_the_order_to_the_end():
    got = cost(
        {"planned": 1, "draining": 10, "requeued": 20, "configured": 21, "started": 23, "training": 30}
    )
    assert (got["total_s"], got["measured"], got["drained_s"]) == (20, False, 0)
    assert got["steps"] == {"requeue": 10, "configure": 1, "start": 2, "first_step": 7}


def test_training_between_the_order_and_the_last_step_is_not_lost():
    got = cost(
        {"planned": 1, "draining": 10, "checkpointed": 15, "training": 33},
        {"last_step_at": 14, "stopped_at": 14.5, "checkpoint_s": 0.4},
        {"first_step_at": 30},
    )
    assert (got["total_s"], got["drained_s"], got["measured"]) == (16, 4, True)
    assert got["steps"] == {"stop": 0.5, "checkpoint": 0.5, "first_step": 15}


def test_the_time_of_the_checkpoint_is_the_agents_own_measure():
    acknowledged = {"last_step_at": 10, "stopped_at": 14.9, "checkpoint_s": 4}
    got = cost(
        {"planned": 1, "draining": 9, "checkpointed": 15, "training": 20}, acknowledged, {"first_step_at": 20}
    )
    assert got["steps"] == {"stop": 1, "checkpoint": 4, "first_step": 5}


def test_a_node_whose_clock_is_behind_makes_no_negative_interval():
    got = cost(
        {"planned": 1, "draining": 10, "checkpointed": 15, "requeued": 16, "training": 40},
        {"last_step_at": 14},
        {"launched_at": 12, "first_step_at": 30},
    )
    assert got["steps"] == {"checkpoint": 1, "requeue": 1, "launch": 0, "first_step": 14}


@pytest.mark.parametrize(
    ("claimed", "total"),
    [
        ({"last_step_at": 0}, 24.0),  # "it cost me all the time since 1970"
        ({"last_step_at": 1e12}, 15.0),  # "it cost me nothing"
        ({"last_step_at": 14}, 16.0),
    ],
)
def test_a_claimed_cost_stays_within_what_polluxd_saw(claimed, total):
    times = {"planned": 1, "draining": 6, "checkpointed": 15, "requeued": 16, "started": 29, "training": 33}
    assert cost(times, claimed, {"first_step_at": 30})["total_s"] == total
    early = cost(times, {"last_step_at": 14}, {"first_step_at": 0})
    assert early["total_s"] == 15.0, "the job had no processes before it was started"
    assert cost(times, {"last_step_at": 14}, {"first_step_at": 1e12})["total_s"] == 19.0


def test_a_start_is_counted_from_its_placing():
    got = cost_of(
        row({"planned": 1, "configured": 50, "started": 51, "training": 60}, path="start"), NO_PLACEMENT, N1
    )
    assert (got["total_s"], got["from"]) == (10, "none")


def test_first_starts_are_no_moves():
    assert not is_move("start", 0)
    assert is_move("start", 1)
    assert is_move("requeue", 0)


def test_totals_per_job():
    costs = [cost({"planned": 0, "training": seconds}) for seconds in (4, 6)]
    (total,) = totals(costs).values()
    assert (total.count, total.lost_seconds, total.mean_cost) == (2, 10, {"requeue": 5})
    assert totals([]) == {}


def test_a_job_resized_in_place_pauses_for_as_long_as_its_agent_says():
    times = {"planned": 1, "recruiting": 2, "configured": 4, "started": 5, "training": 9}
    got = cost(times, resumed={"resize_cost": 0.25}, path="resize")
    assert (got["total_s"], got["steps"], got["measured"]) == (0.25, {"resize": 0.25}, True)
    silent = cost(times, path="resize")
    assert (silent["total_s"], silent["measured"]) == (4, False), "no more than since all else was done"


def test_means_are_by_path():
    costs = [
        cost({"planned": 0, "training": 6}),
        cost({"planned": 0, "draining": 1, "training": 11}, path="start"),
        cost({"planned": 0, "training": 9}, resumed={"resize_cost": 0.5}, path="resize"),
    ]
    (total,) = totals(costs).values()
    assert (total.count, total.lost_seconds) == (3, 16.5)
    assert total.mean_cost == {"requeue": 8, "resize": 0.5}


stamp = st.floats(0, 1e9)


@given(
    st.fixed_dictionaries(
        {"planned": stamp, "training": stamp},
        optional=dict.fromkeys(("draining", "checkpointed", "requeued", "configured", "started"), stamp),
    ),
    st.none() | st.fixed_dictionaries({}, optional={"last_step_at": stamp, "stopped_at": stamp}),
    st.none()
    | st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("launched_at", "imported_at", "restored_at", "first_step_at"), stamp)
    ),
)
def test_steps_add_up_whatever_the_clocks_say(times, acknowledged, resumed):
    got = cost(times, acknowledged, resumed)
    assert got["total_s"] >= 0
    assert all(seconds >= 0 for seconds in got["steps"].values())
    assert sum(got["steps"].values()) == pytest.approx(got["total_s"])
