"""Node records: two Slurm versions, bad records, and held GPUs."""

from __future__ import annotations

import pytest

from polluxd.errors import SlurmGarbled
from polluxd.model import Node
from polluxd.slurm.node_records import NodeRecords, attribute, parse_nodes
from polluxd.slurm.queue import Queue
from tests.unit.slurm.scontrol_output import NODE, NODE_26_05
from tests.unit.slurm.squeue_stand_in import RUNNING, queue


def node(name: str, used: int = 0, cpus: int = 0, **words: str) -> str:
    text = NODE.replace("NodeName=n1", f"NodeName={name}").replace("GresUsed=gpu:0", f"GresUsed=gpu:{used}")
    text = text.replace("CPUAlloc=0", f"CPUAlloc={cpus}")
    for key, value in words.items():
        text = text.replace(f" {key}=", f" {key}={value} Was=", 1)
    return text


def on(job_id: int, nodes: str, count: int, gpus: int, *, ours: bool = True, **other: str) -> dict[str, str]:
    comment = RUNNING["admin_comment"] if ours else ""
    held = {"JobID": str(job_id), "NodeList": nodes, "NumNodes": str(count), "NumCPUs": str(count * gpus)}
    named = {key.replace("_", "-"): value for key, value in other.items()}
    return RUNNING | held | {"tres-per-node": f"gres:gpu:{gpus}", "admin_comment": comment} | named


def foreign(jobs: Queue, *nodes: str) -> dict[str, int]:
    _, shown, _ = attribute(jobs, parse_nodes("".join(nodes)))
    return {n.name: n.foreign_gpus for n in shown}


def test_a_node_of_22_05_and_administrators_words() -> None:
    (found,) = parse_nodes(NODE).nodes
    assert found == Node("n1", 4, partitions=frozenset({"main", "debug"}), cpus=8, tmp_mb=0, memory_mb=4000)


def test_a_node_of_26_05() -> None:
    records = parse_nodes(NODE_26_05)
    (found,) = records.nodes
    assert (found.gpus, found.gpu_type, found.cpus, found.schedulable) == (4, "a100", 8, True)
    assert found.partitions == {"main", "pollux"}
    assert (records.gpus_used, records.cpus_used) == ({"n1": 2}, {"n1": 2})


POWER = {"POWERED_DOWN": "off", "POWERING_UP": "booting"}


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        ("IDLE", True),
        ("MIXED", True),
        ("ALLOCATED", True),
        ("MIXED+PLANNED", True),
        ("IDLE+COMPLETING", True),
        ("IDLE+CLOUD", True),
        ("IDLE+DRAIN", False),
        ("MIXED+DRAIN", False),
        ("DOWN", False),
        ("DOWN*", False),
        ("IDLE*", False),
        ("IDLE+MAINTENANCE", False),
        ("IDLE+REBOOT_REQUESTED", False),
        ("IDLE+CLOUD+POWERED_DOWN", True),
        ("MIXED+CLOUD+POWERING_UP", True),
        ("ALLOCATED+CLOUD+NOT_RESPONDING+POWERING_UP", True),
        ("IDLE+CLOUD+POWERED_DOWN+NOT_RESPONDING", True),  # a boot has failed
        ("IDLE+CLOUD+NOT_RESPONDING", False),
        ("IDLE+POWERING_DOWN", False),
        ("IDLE+POWER_DOWN", False),
        ("IDLE+RESERVED", True),
        ("UNKNOWN", False),
        ("FUTURE", False),
        ("DOWN+INVALID_REG", False),
    ],
)
def test_node_states(state: str, usable: bool) -> None:
    (found,) = parse_nodes(NODE.replace(" State=IDLE Threads", f" State={state} Threads")).nodes
    assert found.schedulable is usable
    assert found.capacity == (4 if usable else 0)
    assert found.power == next((power for word, power in POWER.items() if word in state), "on")


@pytest.mark.parametrize(
    "bad", [{"Gres": "gpu:a:b:c"}, {"CPUTot": "?"}, {"CPUAlloc": "-1"}, {"GresUsed": "gpu:?"}]
)
def test_a_node_that_makes_no_sense_is_closed_and_costs_nothing_else(bad: dict[str, str]) -> None:
    records = parse_nodes(node("n1") + node("n2", **bad) + node("n3"))
    assert [(n.name, n.capacity) for n in records.nodes] == [("n1", 4), ("n2", 0), ("n3", 4)]
    assert list(records.unreadable) == ["node n2"]
    assert not records.nodes[1].schedulable


def test_no_nodes_and_answers_that_are_none() -> None:
    assert parse_nodes("") == parse_nodes("No nodes in the system\n") == NodeRecords((), {}, {}, {}, {})
    for text in (NODE[:-1], "slurm_load_node error: something\n", "{}\n"):
        with pytest.raises(SlurmGarbled):
            parse_nodes(text)


def test_foreign_use_is_what_no_job_of_ours_holds() -> None:
    jobs = queue(on(1, "n[1-2]", 2, 2), on(2, "n1", 1, 1, ours=False))
    _, shown, _ = attribute(jobs, parse_nodes(node("n1", 3, 5) + node("n2", 2, 2) + node("n3")))
    assert [(n.name, n.foreign_gpus, n.foreign_cpus) for n in shown] == [
        ("n1", 1, 3),
        ("n2", 0, 0),
        ("n3", 0, 0),
    ]


def test_memory_in_use_is_foreign_without_what_ours_have() -> None:
    ours = on(1, "n1", 1, 2, tres_alloc="cpu=2,mem=1001M,node=1,gres/gpu=2")
    jobs = queue(ours, on(2, "n1", 1, 1, ours=False))
    text = node("n1", 3, AllocMem="3001", MemSpecLimit="500") + node("n2", AllocMem="700")
    placed, shown, _ = attribute(jobs, parse_nodes(text.replace(" CfgTRES", " MemSpecLimit=500 CfgTRES")))
    assert placed[0].mem_per_gpu_mb == 500, "rounded down: what fits stays"
    assert [(n.memory_mb, n.foreign_memory_mb) for n in shown] == [(3500, 2001), (3500, 0)]


def test_what_a_foreign_job_asks_for_is_not_what_it_holds() -> None:
    # Asked for by job: squeue does not tell what it holds where, its nodes do.
    plain = on(2, "n[1-2]", 2, 1, ours=False, tres_per_node="N/A", tres_per_job="gres:gpu:5")
    assert foreign(queue(plain), node("n1", 4), node("n2", 1), node("n3")) == {"n1": 4, "n2": 1, "n3": 0}


def test_a_job_of_ours_that_started_after_squeue_is_not_foreign() -> None:
    assert foreign(queue(), node("n1", 4)) == {"n1": 0}
    assert foreign(queue(on(2, "n2", 1, 1, ours=False)), node("n1", 4), node("n2", 1)) == {"n1": 0, "n2": 1}


def test_a_foreign_job_that_is_ending_holds_its_gpus() -> None:
    ending = on(2, "n1", 1, 3, ours=False, State="COMPLETING")
    assert foreign(queue(ending), node("n1", 0)) == {"n1": 3}, "22.05 counts them as free"
    assert foreign(queue(ending), node("n1", 3)) == {"n1": 4}, (
        "a later version does not; never more than there are"
    )
    ours = on(1, "n1", 1, 2)
    assert foreign(queue(ending, ours), node("n1", 2)) == {"n1": 2}, "ours are ours"


def test_the_gpus_of_a_job_that_cannot_be_read_are_taken() -> None:
    jobs = queue(on(1, "n1", 1, 1), on(2, "n[1-", 1, 2, ours=False))
    assert list(jobs.unreadable) == ["job 2"]
    assert foreign(jobs, node("n1", 3), node("n2", 4)) == {"n1": 2, "n2": 4}


def test_a_scattered_job_of_ours_holds_what_its_nodes_say() -> None:
    scattered = on(1, "n[1-2]", 2, 1, tres_per_node="N/A", tres_per_job="gres:gpu:5")
    plain = on(2, "n1", 1, 1, ours=False)
    placed, shown, unknown = attribute(
        queue(scattered, plain), parse_nodes(node("n1", 4) + node("n2", 2) + node("n3"))
    )
    assert placed[0].gpus_per_node_held == {"n1": 3, "n2": 2}
    assert [n.foreign_gpus for n in shown] == [1, 0, 0]
    assert not unknown


def test_two_scattered_jobs_on_a_node_are_left_alone_with_their_gpus() -> None:
    jobs = queue(
        *(on(i, "n[1-2]", 2, 1, tres_per_node="N/A", tres_per_job="gres:gpu:4") for i in (1, 2)),
        on(3, "n3", 1, 2),
    )
    placed, shown, unknown = attribute(jobs, parse_nodes(node("n1", 4) + node("n2", 4) + node("n3", 2)))
    assert [job.spec is None for job in placed] == [True, True, False]
    assert [n.foreign_gpus for n in shown] == [4, 4, 0]
    assert set(unknown) == {"job 1", "job 2"}


def test_a_senseless_record_that_holds_nothing_leaves_scattered_jobs_managed() -> None:
    scattered = on(1, "n[1-2]", 2, 1, tres_per_node="N/A", tres_per_job="gres:gpu:5")
    nodes = parse_nodes(node("n1", 3) + node("n2", 2))
    senseless = on(2, "", 1, 1, State="PENDING", TimeLimit="zz")
    array = on(3, "", 1, 1, State="PENDING") | {"admin_comment": "pollux:v1 array-limit=999999999999"}
    jobs = queue(scattered, senseless, array)
    assert set(jobs.unreadable) == {"job 2", "job 3"}
    placed, _, unknown = attribute(jobs, nodes)
    assert placed[0].spec is not None
    assert placed[0].gpus_per_node_held == {"n1": 3, "n2": 2}
    assert not unknown


@pytest.mark.parametrize(
    ("words", "together"),
    [
        ({"CPUTot": "12", "Sockets": "1", "CoresPerSocket": "6", "ThreadsPerCore": "2"}, 2),
        ({"CPUTot": "16", "Sockets": "2", "CoresPerSocket": "2", "ThreadsPerCore": "4"}, 4),
        ({"CPUTot": "6", "Sockets": "1", "CoresPerSocket": "6", "ThreadsPerCore": "2"}, 1),
        ({"CPUTot": "8", "Sockets": "8", "CoresPerSocket": "1", "ThreadsPerCore": "1"}, 1),
    ],
)
def test_cpus_are_given_by_whole_cores(words: dict[str, str], together: int) -> None:
    (found,) = parse_nodes(node("n1", **words)).nodes
    assert found.cpus_per_core == together
