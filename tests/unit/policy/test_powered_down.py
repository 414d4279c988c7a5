"""Nodes that Slurm has powered down: nobody grows there, and only a job without room elsewhere starts there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polluxd.model import GpuLimit, JobSpec
from polluxd.model.snapshot_json import decode_snapshot, encode
from polluxd.policy import decide
from tests.build import job, node, report, running, snapshot
from tests.unit.policy.scenarios import snapshots

AWAKE, ASLEEP = node("n1"), (node("c1", power="off"), node("c2", power="off"))


def places(snap) -> dict[int, tuple[tuple[str, ...], int]]:
    return {a.job_id: (a.placement.nodes, a.placement.gpus) for a in decide(snap).allocations if a.placement}


def test_a_running_job_does_not_grow_onto_a_node_that_is_powered_down() -> None:
    grows = running(1, ["n1"], 4, report=report())
    assert places(snapshot([AWAKE, *ASLEEP], [grows])) == {1: (("n1",), 4)}
    awake = [AWAKE, *(replace(n, power="on") for n in ASLEEP)]
    assert places(snapshot(awake, [grows]))[1][1] == 12, "it would on a node that is on"


def test_a_waiting_job_starts_on_awake_nodes_where_they_have_room() -> None:
    found = places(snapshot([AWAKE, *ASLEEP], [running(1, ["n1"], 4, report=report()), job(2)]))
    assert {nodes for nodes, _ in found.values()} == {("n1",)}


def test_a_job_without_room_starts_on_its_least_size_and_says_that_slurm_boots() -> None:
    full = [running(n, ["n1"], 1, JobSpec(preemptible=False)) for n in range(1, 5)]
    plan = decide(snapshot([AWAKE, *ASLEEP], [*full, job(5, report=report())]))
    started = plan.of(5)
    assert started is not None
    assert (started.placement.gpus, started.placement.nodes[0][0]) == (1, "c")
    assert "Slurm boots the nodes" in started.reason
    assert all(plan.of(n).placement.nodes == ("n1",) for n in range(1, 5))


def test_a_job_larger_than_all_awake_nodes_starts_on_nodes_that_boot() -> None:
    found = places(snapshot([AWAKE, *ASLEEP], [job(1, JobSpec(min_gpus=8), report=report())]))
    assert found == {1: (("c1", "c2"), 8)}


@pytest.mark.parametrize("ceilings", [{"user_ceilings": {"ada": 4}}, {"account_ceilings": {"lab": 4}}])
def test_ceilings_hold_over_awake_nodes_and_nodes_that_boot(ceilings) -> None:
    full = [running(n, ["n1"], 1, JobSpec(preemptible=False)) for n in range(1, 5)]
    assert 5 not in places(snapshot([AWAKE, *ASLEEP], [*full, job(5)], **ceilings))


def test_limits_of_slurm_hold_over_awake_nodes_and_nodes_that_boot() -> None:
    full = [running(n, ["n1"], 1, JobSpec(preemptible=False)) for n in range(1, 5)]
    snap = snapshot([AWAKE, *ASLEEP], [*full, job(5), job(6)])
    limited = replace(snap, limits=(GpuLimit("gres/gpu=5 of account lab", (1, 2, 3, 4, 5, 6), 5),))
    assert len({5, 6} & places(limited).keys()) == 1
    assert {5, 6} <= places(snap).keys()


def test_a_pinned_job_and_a_job_that_must_stay_out_boot_nothing() -> None:
    full = [running(n, ["n1"], 1, JobSpec(preemptible=False)) for n in range(1, 5)]
    assert 5 not in places(snapshot([AWAKE, *ASLEEP], [*full, job(5, pinned=True, pin_reason="a rule")]))


@settings(max_examples=60, deadline=None)
@given(snapshots, st.integers(0, 63))
def test_who_holds_gpus_on_awake_nodes_does_not_depend_on_nodes_that_are_off(snap, bits) -> None:
    held = {name for j in snap.jobs for name in j.placement.nodes}
    nodes = tuple(
        replace(n, power="off") if bits >> i & 1 and n.name not in held else n
        for i, n in enumerate(snap.nodes)
    )
    off = {n.name for n in nodes if n.power == "off"}
    without = tuple(replace(n, schedulable=False, power="on") if n.name in off else n for n in nodes)
    found = decide(replace(snap, nodes=nodes))
    for one, other in zip(found.allocations, decide(replace(snap, nodes=without)).allocations, strict=True):
        on_off = off & set(one.placement.nodes)
        assert one.placement == other.placement or (on_off and not other.placement)
        assert not on_off or not next(j for j in snap.jobs if j.job_id == one.job_id).placement
    stored = replace(snap, nodes=nodes)
    assert decode_snapshot(encode(stored)) == stored
