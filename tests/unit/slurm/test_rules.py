"""Read partitions and reservations as Slurm 22.05.8 prints them.

Some records make no sense.
"""

from __future__ import annotations

from math import inf

import pytest

from polluxd.errors import SlurmGarbled
from polluxd.slurm.rules import (
    Partition,
    Reservation,
    Rules,
    parse_partitions,
    parse_preemption,
    parse_reservations,
)
from tests.unit.slurm.scontrol_output import PARTITION, RESERVATION

ALL = frozenset({"n1", "n2", "n3", "n4"})


def test_partitions() -> None:
    text = PARTITION + PARTITION.replace("=main", "=debug").replace("State=UP", "State=DOWN")
    found, unreadable = parse_partitions(text)
    assert found == {"main": Partition("main", "UP", ALL), "debug": Partition("debug", "DOWN", ALL)}
    assert [p.starts for p in found.values()] == [True, False]
    assert not unreadable


def test_the_least_nodes_and_what_goes_with_each_gpu() -> None:
    words = PARTITION.replace("MinNodes=0", "MinNodes=2")
    words = words.replace("JobDefaults=(null)", "JobDefaults=DefCpuPerGPU=8,DefMemPerGPU=30000")
    found, _ = parse_partitions(words)
    main = found["main"]
    assert (main.min_nodes, main.cpus_per_gpu, main.memory_per_gpu_mb) == (2, 8, 30000)


@pytest.mark.parametrize(
    ("words", "exclusive"),
    [("OverSubscribe=EXCLUSIVE", True), ("OverSubscribe=FORCE:4", False), ("ExclusiveUser=YES", True)],
)
def test_a_partition_that_shares_no_node(words: str, exclusive: bool) -> None:
    key, _ = words.split("=")
    found, _ = parse_partitions(PARTITION.replace(f"{key}=NO", words))
    assert found["main"].exclusive is exclusive


def test_reservations() -> None:
    daily = RESERVATION.replace("MAINT", "DAILY").replace("root_1", "nightly")
    floating = RESERVATION.replace("MAINT", "TIME_FLOAT").replace("root_1", "floating")
    found, unreadable = parse_reservations(RESERVATION + daily + floating)
    users = frozenset({"root"})
    assert found == (
        Reservation("root_1", 1795330000, 1795333600, ALL, users=users),
        Reservation("nightly", 1795330000, 1795333600, ALL, 86400, users),
        Reservation("floating", 0, inf, ALL, users=users),
    )
    (others,), _ = parse_reservations(RESERVATION.replace("Users=root", "Users=-root"))
    assert [one.admits(user) for one in (found[0], others) for user in ("root", "ann")] == [1, 0, 0, 1]
    assert not unreadable


def test_none() -> None:
    assert parse_reservations("No reservations in the system\n") == ((), {})
    assert parse_partitions("") == ({}, {})
    assert Rules().forbidden(inf, 0.0) == {}


def test_a_record_that_makes_no_sense_forbids_and_is_named() -> None:
    found, unreadable = parse_partitions(PARTITION.replace("n[1-4]", "n[1-"))
    assert not found["main"].starts
    assert "partition main" in unreadable
    reservations, unreadable = parse_reservations(
        RESERVATION.replace("StartTime=1795330000", "StartTime=soon")
    )
    assert reservations == (Reservation("root_1", 0.0, inf, None),)
    assert "reservation root_1" in unreadable
    assert Rules({}, reservations).forbidden(10.0, 5.0) == {"*": reservations[0]}


@pytest.mark.parametrize("text", ["slurm_load_partitions error: x\n", PARTITION[:-1], "{}\n"])
def test_what_is_no_list_is_garbled(text: str) -> None:
    with pytest.raises(SlurmGarbled):
        parse_partitions(text)


def test_which_qos_preempts_which() -> None:
    answer = "normal|scavenge\nscavenge|\nhigh|normal,scavenge\n"
    assert parse_preemption(answer) == {
        "normal": frozenset({"scavenge"}),
        "high": frozenset({"normal", "scavenge"}),
    }
    with pytest.raises(SlurmGarbled, match="expected a QOS"):
        parse_preemption("sacctmgr: error: x\n")
