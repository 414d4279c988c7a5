"""Every GPU hour by its cause, against a count minute by minute."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from polluxd.site_report.gpu_hours import CAUSES, DEMANDS, divided
from polluxd.site_report.job_log import read
from polluxd.site_report.machine import Closed, Nodes, placed

from .site_text import T0, written

MINUTES = 120
SITE = {"n1": (4, "x", ("a",)), "n2": (4, "x", ("a", "b")), "n3": (8, "y", ("b",)), "n4": (1, "y", ("c",))}
STATES = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED by 1000", "NODE_FAIL")


@st.composite
def jobs(draw: Any) -> list[dict[str, Any]]:
    """Return jobs that start wherever there is room at random, and some that never do."""
    free = {name: [gpus] * MINUTES for name, (gpus, _, _) in SITE.items()}
    made = []
    for number in range(draw(st.integers(0, 14))):
        partition = draw(st.sampled_from(["a", "b", "c", "a,b"]))
        nodes = draw(st.sampled_from([1, 1, 1, 2]))
        gpus = draw(st.integers(nodes, 8))
        eligible = draw(st.integers(-20, MINUTES - 1))
        start = eligible + draw(st.integers(0, 60))
        end = start + draw(st.integers(1, 90))
        job: dict[str, Any] = {"id": number + 1, "partition": partition, "nodes": nodes, "gpus": gpus}
        job |= {"eligible": eligible, "type": draw(st.sampled_from(["", "", "x", "y"]))}
        share = [gpus // nodes + (place < gpus % nodes) for place in range(nodes)]
        fitting = [
            name
            for name, (_, kind, parts) in SITE.items()
            if set(parts) & set(partition.split(","))
            and job["type"] in ("", kind)
            and all(free[name][minute] >= share[0] for minute in range(max(start, 0), min(end, MINUTES)))
        ]
        if len(fitting) >= nodes and draw(st.integers(0, 4)):
            places = fitting[:nodes]
            for name, held in zip(places, share, strict=True):
                for minute in range(max(start, 0), min(end, MINUTES)):
                    free[name][minute] -= held
            state = draw(st.sampled_from(STATES))
            open_end = end > MINUTES and draw(st.booleans())
            job |= {"start": start, "end": None if open_end else end, "places": places}
            job |= {"state": "RUNNING" if open_end else state, "share": share}
        elif draw(st.booleans()):
            job |= {"end": end, "state": "CANCELLED by 7"}
        else:
            job |= {"state": "PENDING"}
            if draw(st.booleans()):
                job |= {"shown": f"{number + 1}_[0-4%2]", "tasks": 5}
        made.append(job)
    return made


CLOSED = st.lists(
    st.tuples(
        st.sampled_from([*SITE, "n9"]),
        st.integers(-30, MINUTES),
        st.integers(1, 60),
        st.sampled_from(["down", "reserved"]),
    ),
    max_size=4,
)


def by_minute(jobs, closed, first, last):
    """Count GPU minutes by cause, one minute after the other, with nothing of the code under test."""
    found: Counter[str] = Counter()
    fitted: dict[int, Counter[str]] = defaultdict(Counter)
    for minute in range(first, last):
        free = {name: gpus for name, (gpus, _, _) in SITE.items()}
        waiting = []
        for job in jobs:
            end = MINUTES if job.get("end") is None else job["end"]
            if job.get("start") is not None and job["start"] <= minute < end:
                state = job["state"]
                cause = {"COMPLETED": "finished", "RUNNING": "running"}.get(state, "lost")
                for name, held in zip(job["places"], job["share"], strict=True):
                    free[name] -= held
                    found[cause] += held
            elif job["eligible"] <= minute < (end if job.get("start") is None else job["start"]):
                waiting.append(job)
        for name in list(free):
            causes = {
                cause
                for node, begin, length, cause in closed
                if node == name and begin <= minute < begin + length
            }
            if causes:
                found["down" if "down" in causes else "reserved"] += free[name]
                free[name] = 0
        left, wanted = sum(free.values()), Counter()
        for job in waiting:
            usable = [
                free[name]
                for name, (_, kind, parts) in SITE.items()
                if set(parts) & set(job["partition"].split(",")) and job["type"] in ("", kind)
            ]
            each = -(-job["gpus"] // job["nodes"])
            if sum(gpus >= each for gpus in usable) >= job["nodes"]:
                why = "fits"
            elif sum(usable) >= job["gpus"]:
                why = "fragments"
            else:
                why = "walls" if sum(free.values()) >= job["gpus"] else "few"
            wanted[why] += job["gpus"] * job.get("tasks", 1)
            fitted[job["id"]][why] += 1
        for why in DEMANDS:
            taken = min(left, wanted[why])
            found[why] += taken
            left -= taken
        found["no_demand"] += left
    return found, fitted


def nodes_of_site() -> Nodes:
    return Nodes(
        gpus={name: gpus for name, (gpus, _, _) in SITE.items()},
        kind={name: kind for name, (_, kind, _) in SITE.items()},
        partitions={name: parts for name, (_, _, parts) in SITE.items()},
    )


_SPREAD = [
    {
        "id": 1,
        "partition": "b",
        "gpus": 7,
        "eligible": 0,
        "start": 0,
        "end": 90,
        "places": ["n3"],
        "share": [7],
    },
    {
        "id": 2,
        "partition": "b",
        "gpus": 3,
        "eligible": 0,
        "start": 0,
        "end": 90,
        "places": ["n2"],
        "share": [3],
    },
    {"id": 3, "partition": "b", "gpus": 3, "eligible": 10, "state": "PENDING"},
]
"""Three GPUs on two nodes are two on one of them: one idle GPU on each is not enough."""
UNEVEN = [
    {"nodes": 1, "type": "", "state": "COMPLETED"} | job | {"nodes": 1 + (job["id"] == 3)} for job in _SPREAD
]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@example(UNEVEN, [], 60)
@given(jobs(), CLOSED, st.integers(1, MINUTES - 1))
def test_each_gpu_minute_has_the_cause_that_a_count_by_minutes_finds(tmp_path_factory, jobs, closed, turn):
    records = read(written(tmp_path_factory.mktemp("log") / "log", jobs))
    assert len(records) == len(jobs)
    shut = [
        Closed(node, T0 + 60 * begin, T0 + 60 * (begin + length), cause)
        for node, begin, length, cause in closed
    ]
    edges = [T0, T0 + 60 * turn, T0 + 60 * MINUTES]
    found = divided(records, placed(records, nodes_of_site()), shut, edges)
    waited: dict[int, Counter[str]] = defaultdict(Counter)
    for place, (first, last) in enumerate([(0, turn), (turn, MINUTES)]):
        expected, fitted = by_minute(jobs, closed, first, last)
        for cause in CAUSES:
            assert found.causes[cause][place] / 60 == pytest.approx(expected[cause], abs=1e-6), cause
        for job, reasons in fitted.items():
            waited[job] += reasons
    assert found.capacity / 60 == pytest.approx(17 * MINUTES), "all GPUs, all the time"
    assert found.excess == 0
    told = {
        int(records.job[r]): row for r, row in zip(found.waits.record, found.waits.by_demand, strict=True)
    }
    for job, reasons in waited.items():
        assert list(told[job] / 60) == pytest.approx([reasons[why] for why in DEMANDS]), job
