"""A stored snapshot leads to the same decision as the original.

Storing keeps every field, and every bit of every number.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams
from polluxd.config.settings import PolicySettings
from polluxd.errors import StoreRejected
from polluxd.model import JobSpec, Node, Placement, Report, Snapshot, SnapshotJob, Spent
from polluxd.model.snapshot_json import decode_snapshot, encode, to_json

FULL = Snapshot(
    cluster="dev",
    taken_at=1_700_000_000.125,
    nodes=(
        Node(
            "n1",
            4,
            "a100",
            1,
            False,
            frozenset({"main", "night"}),
            64,
            3,
            "s1",
            frozenset({"ib"}),
            900,
            3,
            5,
            4,
            "booting",
            61.5,
            1_699_999_940.25,
        ),
        Node("n2", 8),
    ),
    jobs=(
        SnapshotJob(
            job_id=7,
            name='res"net\u00e9',
            user="ada",
            account="vision",
            partition="main",
            spec=JobSpec(2, 8, False, False, 3, 4000, "1,2,4,8", True, "lr"),
            submitted_at=1.1,
            age=5e-324,
            placement=Placement(("n1", "n2"), 2),
            report=Report(
                attempt=3,
                at=2.2,
                limits=BatchLimits(64, 4096, 8, 512),
                params=ThroughputParams(0.1, 0.1 + 0.2, 1e-300, 1e22, 1e300, 2.0, math.inf, 3e-5, 0.7),
                noise=NoiseScale(1 / 3, -0.0),
                explored_gpus=4,
                explored_nodes=2,
                gpus=4,
                nodes=2,
                batch_size=256,
                goodput=1e16,
                throughput=3.0,
                progress=4.0,
                target=5.0,
                epoch=2.5,
                lr_factor=1.9,
                checkpointed=True,
                first_step_at=6.0,
                restart_cost=7.0,
            ),
            weight=0.7,
            pinned=True,
            pin_reason="moving",
            keeps=("n2", "n1"),
            started=True,
            waiting=0.3,
            time_limit=86400.5,
            attempt=3,
            qos="high",
            moves=2,
            lost_seconds=14.1,
            move_cost=7.05,
            resize_cost=0.5,
            max_gpus_rule="QOS big",
            doubts=("explored_gpus=9",),
            doubted_reports=2,
            contiguous=True,
        ),
        SnapshotJob(8, "bare", "bob", "nlp", "main", JobSpec(), 3.3, 4.4),
    ),
    settings=PolicySettings(
        power=-math.inf,
        account_weights={"vision": 0.1},
        user_weights={"ada": 2.0},
        qos_weights={"high": 4.0},
        job_weights={"7": 0.5},
        paused=True,
        partial_nodes=True,
        account_ceilings={"vision": 8},
        user_ceilings={"ada": 4},
        account_guarantees={"nlp": 2},
        user_guarantees={"bob": 1},
        gpu_counts="powers-of-two",
        starvation_bound=3600.0,
        objective="fair-share",
        kappa=2.5,
        fairness_per="user",
        waiting_power=1.5,
        remaining_work_power=-0.5,
        start_gpus=2,
        hysteresis=0.1,
        slurm_priority=0.5,
        cloud_prices={"p4d": 32.8},
        cloud_interruptions={"p4d": 2.0},
        cloud_hour_value=20.0,
        cloud_account_hour_values={"vision": 40.0},
        cloud_day_budget=500.0,
        cloud_month_budget=9000.0,
        cloud_account_day_budgets={"vision": 200.0},
        cloud_account_month_budgets={"vision": 4000.0},
        cloud_boot_s=120.0,
        cloud_return_s=360.0,
        cloud_paid_interval_s=3600.0,
        cloud_least=1,
        cloud_most=16,
        cloud_hours="8-18",
    ),
    spent=Spent(12.5, 1 / 3, {"vision": 12.5}, {"vision": 1 / 3}, 1e9),
)

FIT = ThroughputParams(0.1, 0.1 + 0.2, 1e-300, 1e22, 1e300, 2.0, 1.5)


def stored(snapshot: Snapshot) -> Any:
    return json.loads(to_json(snapshot), parse_constant=pytest.fail)


def bits(value: Any) -> Any:
    """Return the type and the bits of every number in `value`.

    Plain equality treats 0.0 and -0.0 as equal, and 1 and 1.0.
    """
    if isinstance(value, float):
        return struct.pack(">d", math.nan if math.isnan(value) else value)  # one NaN is as good as another
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), [bits(getattr(value, f.name)) for f in fields(value)]
    if isinstance(value, tuple):
        return type(value), [bits(v) for v in value]
    if isinstance(value, Mapping):
        return sorted((k, bits(v)) for k, v in value.items())
    return type(value), value


def test_every_field_of_the_full_snapshot_differs_from_its_default() -> None:
    """Else a field that the decoder forgot could come back by chance."""
    job = FULL.jobs[0]
    for value in (FULL.nodes[0], job, job.spec, FULL.settings):
        assert is_dataclass(value)
        for field in fields(value):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            assert getattr(value, field.name) != default, field.name


def test_every_field_comes_back_bit_for_bit() -> None:
    assert bits(decode_snapshot(stored(FULL))) == bits(FULL)


def of_type(kind: Any) -> Any:
    """Draw any value of a dataclass, every field by its type.

    Fields that are added to the dataclass later are drawn as well.
    """
    return st.builds(kind, **{f.name: ... for f in fields(kind)})


_WEIGHTS = st.dictionaries(st.text(), st.floats(0, 1000, exclude_min=True))
_MONEY = st.floats(0, 1e9)
_GPUS = st.dictionaries(st.text(), st.integers(0))
SETTINGS = {
    "objective": st.sampled_from(["fair-share", "completion-time"]),
    "kappa": st.floats(0, 100),
    "fairness_per": st.sampled_from(["job", "user", "account"]),
    "power": st.floats(max_value=1, allow_nan=False),
    "account_weights": _WEIGHTS,
    "user_weights": _WEIGHTS,
    "qos_weights": _WEIGHTS,
    "job_weights": st.dictionaries(st.integers(1, 10**9).map(str), st.floats(0, 1000, exclude_min=True)),
    "account_ceilings": _GPUS,
    "user_ceilings": _GPUS,
    "account_guarantees": _GPUS,
    "user_guarantees": _GPUS,
    "gpu_counts": st.sampled_from(["any", "powers-of-two", "1,2,7"]),
    "starvation_bound": st.none() | st.floats(0, exclude_min=True, allow_infinity=False),
    "waiting_power": st.floats(-4, 4),
    "remaining_work_power": st.floats(-4, 4),
    "start_gpus": st.integers(1, 64),
    "hysteresis": st.floats(0, 1),
    "slurm_priority": st.floats(0, 1),
    "cloud_prices": st.dictionaries(st.text(), st.floats(0.01, 1e6)),
    "cloud_interruptions": st.dictionaries(st.text(), st.floats(0.01, 1440)),
    "cloud_hour_value": _MONEY,
    "cloud_account_hour_values": st.dictionaries(st.text(), _MONEY),
    "cloud_day_budget": st.none() | _MONEY,
    "cloud_month_budget": st.none() | _MONEY,
    "cloud_account_day_budgets": st.dictionaries(st.text(), _MONEY),
    "cloud_account_month_budgets": st.dictionaries(st.text(), _MONEY),
    "cloud_boot_s": _MONEY,
    "cloud_return_s": _MONEY,
    "cloud_paid_interval_s": _MONEY,
    "cloud_least": st.integers(0, 99),
    "cloud_most": st.none() | st.integers(0, 99),
    "cloud_hours": st.sampled_from(["0-24", "8-18"]),
}
"""How to draw the settings that are checked as they are made; a switch is drawn by its type."""
st.register_type_strategy(
    PolicySettings,
    st.builds(
        PolicySettings, **{f.name: SETTINGS.get(f.name, st.booleans()) for f in fields(PolicySettings)}
    ),
)
for _kind in (Node, JobSpec, Report, SnapshotJob):
    st.register_type_strategy(_kind, of_type(_kind))
st.register_type_strategy(Placement, st.sampled_from([Placement(), Placement(("n1", "n\u00e9"), 3)]))
st.register_type_strategy(
    BatchLimits, st.builds(BatchLimits, st.integers(8, 99), st.just(999), st.just(8), st.just(9))
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(of_type(Snapshot))
def test_any_snapshot_comes_back_bit_for_bit(made: Snapshot) -> None:
    assert bits(decode_snapshot(stored(made))) == bits(made)


def test_numbers_that_json_has_are_written_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = NoiseScale(0.1, 5.0)
    assert FULL.jobs[0].report is not None
    report = replace(FULL.jobs[0].report, params=FIT, noise=noise, params_by_type={"a": FIT})
    plain = Snapshot("dev", 1.5, FULL.nodes, (replace(FULL.jobs[1], report=report), FULL.jobs[1]))
    whole = json.dumps(encode(plain))

    def parts_alone(value: object) -> Any:
        assert value is not plain
        return encode(value)

    monkeypatch.setattr("polluxd.model.snapshot_json.encode", parts_alone)
    assert bits(decode_snapshot(stored(plain))) == bits(plain)
    assert len(to_json(plain)) < 0.8 * len(whole)
    assert '"report"' not in to_json(replace(plain, jobs=plain.jobs[1:])), (
        "a field that says nothing is left out"
    )


def test_a_snapshot_of_an_older_version_has_the_defaults() -> None:
    data = stored(FULL)
    for part, gone in (
        (data["settings"], "hysteresis"),
        (data["jobs"][0], "waiting"),
        (data["jobs"][0]["spec"], "gpu_counts"),
        (data["jobs"][0]["report"], "first_step_at"),
        (data["nodes"][0], "cpus"),
    ):
        del part[gone]
    read = decode_snapshot(data)
    assert read.settings.hysteresis == PolicySettings().hysteresis
    job = read.jobs[0]
    assert (job.waiting, job.spec.gpu_counts) == (None, "any")
    assert job.report is not None
    assert job.report.first_step_at is None
    assert read.nodes[0].cpus == 0


def test_a_field_of_a_later_version_is_passed_over() -> None:
    data = stored(FULL)
    data["settings"]["mood"] = "bright"
    data["jobs"][0]["colour"] = 3
    assert decode_snapshot(data) == FULL


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d.pop("jobs"), "Snapshot lacks jobs"),
        (lambda d: d["jobs"][0].pop("age"), "Job lacks age"),
        (lambda d: d["jobs"][0].update(age="old"), "could not convert"),
        (lambda d: d["jobs"][0].update(job_id="7"), "expected int, got '7'"),
        (lambda d: d["jobs"][0].update(pinned=1), "expected bool, got 1"),
        (lambda d: d["jobs"][0].update(attempt=True), "expected int, got True"),
        (lambda d: d.update(nodes={"n1": 4}), "expected a list"),
        (lambda d: d["jobs"][0]["placement"].update(gpus_per_node=0), "nodes and GPUs, or neither"),
        (lambda d: d["settings"].update(user_weights=[]), "items"),
    ],
)
def test_what_is_no_snapshot_is_said(change: Any, told: str) -> None:
    data = stored(FULL)
    change(data)
    with pytest.raises(StoreRejected, match=told):
        decode_snapshot(data)


def test_no_snapshot_at_all_is_said() -> None:
    with pytest.raises(StoreRejected, match="expected an object for Snapshot"):
        decode_snapshot([1])
