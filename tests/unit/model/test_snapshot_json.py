"""A stored snapshot leads to the same decision as the original.

Storing keeps every field, and every bit of every number.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams
from polluxd.config.settings import PolicySettings
from polluxd.errors import StoreRejected
from polluxd.model import JobSpec, Node, Placement, Report, Snapshot, SnapshotJob
from polluxd.model.snapshot_json import decode_snapshot, encode, to_json
from tests import build

FIT = ThroughputParams(0.1, 0.1 + 0.2, 1e-300, 1e22, 1e300, 2.0, 1.5)
REPORT = build.report(FIT, noise=NoiseScale(0.1, 5.0), params_by_type={"a": FIT}, first_step_at=6.0)
FULL = build.snapshot(
    [build.node("n1", features=frozenset({"ib"}), cpus=64), build.node("n2", 8)],
    [
        build.running(7, ("n1", "n2"), 2, JobSpec(gpu_counts="1,2,4,8"), report=REPORT, waiting=0.3),
        build.job(8),
    ],
    user_weights={"ada": 2.0},
    least_gain=0.25,
    hysteresis=0.1,
)


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
    "waiting_power": st.floats(-4, 4),
    "start_gpus": st.integers(1, 64),
    "least_gain": st.floats(0, 0.9),
    "hysteresis": st.floats(0, 1),
    "slurm_priority": st.floats(0, 1),
    "cloud_prices": st.dictionaries(st.text(), st.floats(0.01, 1e6)),
    "cloud_hour_value": _MONEY,
    "cloud_month_budgets": st.dictionaries(st.text(), _MONEY),
    "cloud_boot_s": _MONEY,
    "cloud_return_s": _MONEY,
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
    whole = json.dumps(encode(FULL))

    def parts_alone(value: object) -> Any:
        assert value is not FULL
        return encode(value)

    monkeypatch.setattr("polluxd.model.snapshot_json.encode", parts_alone)
    assert bits(decode_snapshot(stored(FULL))) == bits(FULL)
    assert len(to_json(FULL)) < 0.8 * len(whole)
    assert '"report"' not in to_json(replace(FULL, jobs=FULL.jobs[1:])), (
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
