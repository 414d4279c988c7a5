"""Fuzz what Slurm answers: records of jobs, nodes, partitions and limits.

A reader gives sensible values, or names the record that makes no sense. It never crashes, and a record that makes no
sense costs no other record.
"""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from polluxd.errors import SlurmGarbled
from polluxd.model import JobState
from polluxd.slurm.limits import parse_limits
from polluxd.slurm.node_records import attribute, parse_nodes
from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.queue import jobs_query, parse_jobs
from polluxd.slurm.rules import parse_licenses, parse_partitions, parse_reservations
from polluxd.slurm.topology import parse_topology
from tests.unit.slurm.scontrol_output import (
    ALICE,
    BIG,
    HEAD,
    LAB,
    NODE,
    NODE_26_05,
    PARTITION,
    RESERVATION,
    ROOT,
)
from tests.unit.slurm.squeue_stand_in import PENDING, RUNNING, squeue

JOBS = jobs_query()

ANYTHING = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
NINES = ["9" * digits for digits in (18, 19, 5000)]
NUMBERS = st.sampled_from(["0", "1", "-1", "007", "1K", "2-4", "1e3", "NaN", "inf", "0x10", "²", "٣", *NINES])
WORDS = st.sampled_from(
    ["", "(null)", "N/A", "n/a", "NONE", "Unknown", "UNLIMITED", "INVALID", "RUNNING", "COMPLETING", "CANCELLED by 0",
     "n[1-2]", "n[1-999999999]", "n[1-9][1-99999][1-99999]", "n[", "n]", "n[2-1]", "n1,n1", "@all", "n1!n2", "gpu",
     "gres:gpu:4", "gres/gpu:a100:2(IDX:0-1)", "gpu:99999999G", "gres:gpu:x:y:z", "1-00:00:00", "99999999:00",
     "1:2:3:4", "pollux:v1", "pollux:v1 min-gpus=1", "pollux:v1 companion-of=8 attempt=0 move=1 nonce=" + "a" * 32,
     "gres/gpu=8", "cpu=4,gres/gpu=", "matlab:2,ansys@far:x", "x\ny", "\x1b[2J", "%n", "'; --", "a" * 3000]
)  # fmt: skip
VALUES = st.one_of(WORDS, NUMBERS, ANYTHING)
CHANGED_JOBS = st.builds(
    lambda job, changes: job | changes,
    st.sampled_from(
        [RUNNING, PENDING, RUNNING | {"State": "COMPLETING"}, RUNNING | {"tres-per-job": "gres:gpu:8"}]
    ),
    st.dictionaries(st.sampled_from(sorted(RUNNING)), VALUES, max_size=3),
)


@st.composite
def changed_texts(draw: st.DrawFn, *records: str) -> str:
    """Records with some parts replaced, and sometimes with the end cut off."""
    text = "".join(draw(st.lists(st.sampled_from(records), min_size=1, max_size=3)))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.integers(0, 30)))
        text = text[:start] + draw(VALUES) + text[stop:]
    return text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text


def assert_sensible(job: SlurmJob) -> None:
    assert type(job.job_id) is int
    assert type(job.uid) is int
    for held in (job.gpus_per_node_held, job.cpus_per_node_held):
        assert all(type(count) is int and count >= 0 for count in held.values())
    assert sum(job.gpus_per_node_held.values()) <= len(job.gpus_per_node_held) << 20
    if job.state is JobState.PENDING:
        assert not job.gpus_per_node_held
    times = (job.submit_time, job.start_time, job.eligible_time, job.end_time, job.time_limit_s)
    assert all(at is None or (math.isfinite(at) and at >= 0) for at in times)
    if job.spec is not None:
        assert job.spec.min_gpus >= 1


@given(st.lists(CHANGED_JOBS, max_size=3), changed_texts(NODE, NODE_26_05))
@example([RUNNING | {"NodeList": "n[1-2]" + "9" * 5000}], NODE)
def test_jobs_and_nodes_are_read_or_named(jobs: list[dict[str, str]], nodes: str) -> None:
    sound = RUNNING | {"JobID": "4711"}
    try:
        queue = parse_jobs(squeue([*jobs, sound], JOBS.format), JOBS)
    except SlurmGarbled:
        return
    assert 4711 in [job.job_id for job in queue.jobs], "another job's record cost this one"
    for job in queue.jobs:
        assert_sensible(job)
    try:
        records = parse_nodes(nodes)
    except SlurmGarbled:
        return
    ours, seen, _ = attribute(queue, records)
    for job in ours:
        assert_sensible(job)
    for node in seen:
        assert 0 <= node.capacity <= node.gpus
        assert node.foreign_gpus >= 0
        assert node.foreign_cpus >= 0


@given(changed_texts(squeue([RUNNING], JOBS.format), squeue([PENDING], JOBS.format)))
def test_any_answer_of_squeue_is_read_or_refused(text: str) -> None:
    try:
        queue = parse_jobs(text, JOBS)
    except SlurmGarbled:
        return
    for job in queue.jobs:
        assert_sensible(job)


@given(changed_texts(PARTITION, RESERVATION), changed_texts(RESERVATION, PARTITION), VALUES)
def test_rules_are_read_or_named(partitions: str, reservations: str, licenses: str) -> None:
    try:
        found, _ = parse_partitions(partitions)
    except SlurmGarbled:
        pass
    else:
        assert all(p.max_nodes is None or p.max_nodes >= 0 for p in found.values())
    try:
        reserved, _ = parse_reservations(reservations)
    except SlurmGarbled:
        pass
    else:
        assert not any(math.isnan(r.start) or math.isnan(r.end) for r in reserved)
    try:
        free = parse_licenses(f"LicenseName=matlab Total=9 Used=1 Free={licenses} Remote=no\n")
    except SlurmGarbled:
        pass
    else:
        assert all(type(count) is int and count >= 0 for count in free.values())


@given(changed_texts(HEAD + ROOT + LAB, ALICE, BIG, ROOT))
def test_limits_are_read_or_named(text: str) -> None:
    try:
        limits, _ = parse_limits(text)
    except SlurmGarbled:
        return
    for association in limits.associations.values():
        assert association.uid is None or association.uid >= 0


TOPOLOGY = "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[1-4] Switches=\n"


@given(changed_texts(TOPOLOGY, TOPOLOGY.replace("s1", "s2")))
@example(TOPOLOGY.replace("Level=0", "Level=" + "9" * 5000))
@example(TOPOLOGY.replace("[1-4]", "[1-4]" + "9" * 18))
@example(TOPOLOGY.replace("[1-4]", "[1000000000-1000000001]" + "9" * 10))
def test_a_topology_is_read_or_refused(text: str) -> None:
    try:
        parse_topology(text)
    except SlurmGarbled:
        return
