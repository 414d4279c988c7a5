"""A snapshot keeps every bit of its numbers through jsonb.

Postgres stores the numbers of jsonb as decimals.
"""

from __future__ import annotations

import json
import math
import random
import struct
import time
from dataclasses import replace

import pytest

from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams
from polluxd.config.settings import PolicySettings
from polluxd.model import JobSpec, Node, Placement, Plan, Report, Snapshot, SnapshotJob
from polluxd.model.snapshot_json import decode_snapshot, encode

pytestmark = pytest.mark.slurm

EDGES = (
    *(0.0, -0.0, 1.0, 1e15, 1e16, 1e22, 1e23, 2.0**53 + 2, 1.7976931348623157e308, -1.7976931348623157e308),
    *(
        5e-324,
        2.2250738585072014e-308,
        2.225073858507201e-308,
        1e-300,
        0.1,
        0.1 + 0.2,
        1 / 3,
        math.inf,
        -math.inf,
    ),
)


def floats(many: int) -> list[float]:
    """Return the edge cases and `many` doubles of random bits.

    The random doubles have all magnitudes and need every bit.
    """
    draw = random.Random(5)
    drawn = (struct.unpack(">d", draw.randbytes(8))[0] for _ in range(many))
    return [*EDGES, *(x for x in drawn if not math.isnan(x))]


def picture(numbers: list[float]) -> Snapshot:
    report = Report(
        attempt=1,
        at=1_700_000_000.000001,
        limits=BatchLimits(64, 1024, 8, 256),
        params=ThroughputParams(*numbers[:7]),
        noise=NoiseScale(*numbers[7:9]),
        goodput=1e16,
    )
    jobs = tuple(
        SnapshotJob(
            n, 'a "na\u00efve" \\ name', "ada", "vision", "main", JobSpec(gpu_counts="1,2,4"), x, -x, weight=x
        )
        for n, x in enumerate(numbers)
    )
    held = replace(jobs[0], report=report, placement=Placement(("n1", "n2"), 2), waiting=-0.0)
    nodes = (Node("n2", 4, partitions=frozenset({"b", "a"})), Node("n1", 4))
    weights = {f"account{n}": x for n, x in enumerate(numbers) if 0 < x <= 1000}
    return Snapshot(
        "dev", 1e9 + 1 / 3, nodes, (held, *jobs[1:]), PolicySettings(power=-math.inf, account_weights=weights)
    )


def bits(snapshot: Snapshot) -> list[bytes]:
    weights = sorted(snapshot.settings.account_weights.items())
    numbers = [
        x for job in snapshot.jobs for x in (job.submitted_at, job.age, job.weight, job.waiting or 1.0)
    ]
    report = snapshot.jobs[0].report
    assert report is not None
    assert report.params is not None
    assert report.noise is not None
    numbers += [
        *(x for x in report.params if x is not None),
        *report.noise,
        report.at,
        report.goodput,
        snapshot.taken_at,
    ]
    assert all(type(x) is float for x in numbers)
    return [struct.pack(">d", x) for x in (*numbers, *(x for _, x in weights))]


def test_every_bit_comes_back_from_jsonb(store):
    made = picture(floats(2000))
    assert store.lead() is not None
    cycle = store.record_cycle(
        Plan((), -0.1 - 0.2, 0.0, "counts"),
        mode="enforce",
        durations={},
        started_at=time.time(),
        snapshot_json=lambda: json.dumps(encode(made), allow_nan=False),
    )
    read = decode_snapshot(store.cycle_snapshot(cycle))
    assert read == made
    assert bits(read) == bits(made)
    latest = store.latest_cycle()
    assert latest is not None
    assert latest.objective == -0.1 - 0.2
