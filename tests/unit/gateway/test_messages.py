"""What the models accept can be stored and read back by polluxd."""

from __future__ import annotations

import json
import math
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pollux.parameters import ThroughputParams
from polluxd.gateway.payloads import (
    Acknowledgement,
    ReportMessage,
    TokenRequest,
    TrainingMessage,
)
from polluxd.store import rows
from tests.integration.store.reports import payload

NUMBERS = st.one_of(
    st.integers(-2, 2**31 + 2),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(
        [0, 1, -0.0, 1e12, 1e15, 1e300, 1.7e308, 2**31 - 1, 2**63, 10**400, "1", True, None, [], {}]
    ),
)
ADVICE = {"batch_size": 256, "local_batch": 64, "accumulation": 0, "goodput_ratio": 1.25}
TEXTS = st.one_of(
    st.text(max_size=400), st.sampled_from(["in-place", "requeue", "advise", "a100", "\x00", "\ud800"])
)
MEMBERS = st.sampled_from([*ReportMessage.model_fields, "unknown"])


def nested(**members):
    return st.one_of(st.none(), NUMBERS, st.fixed_dictionaries({}, optional=members))


VALUES = st.one_of(
    NUMBERS,
    TEXTS,
    nested(**{name: NUMBERS for name in ("alpha_grad", "beta_grad", "gamma", "alpha_rack", "beta_rack")}),
    nested(sqr=NUMBERS, var=NUMBERS),
    nested(initial=NUMBERS, maximum=NUMBERS, local_min=NUMBERS, local_max=NUMBERS),
    nested(launched_at=NUMBERS, first_step_at=NUMBERS, other=NUMBERS),
    nested(batch_size=NUMBERS, local_batch=NUMBERS, accumulation=NUMBERS, goodput_ratio=NUMBERS),
    nested(id=NUMBERS, why=TEXTS),
)


def stored(report: ReportMessage) -> dict:
    """The row that Postgres returns, with NULL for what is missing."""
    empty = dict.fromkeys(["noise_sqr", "noise_var", *ThroughputParams._fields])
    row = empty | json.loads(json.dumps(report.row(), allow_nan=False))
    now = rows.datetime.fromtimestamp(report.at).astimezone()
    return row | {"job_id": 7, "attempt": 0, "at": now, "received_at": now, "known_gpus": 1, "known_nodes": 1}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.dictionaries(MEMBERS, VALUES, max_size=4))
def test_whatever_is_accepted_can_be_stored_and_read_back_by_polluxd(changes):
    try:
        text = json.dumps(payload(**changes))
    except ValueError:
        return
    try:
        report = ReportMessage.model_validate_json(text)
    except ValidationError:
        return
    row = report.row()
    assert "\x00" not in json.dumps(row)
    read = rows.report(stored(report))
    numbers = [read.goodput, read.throughput, read.progress, read.epoch, read.lr_factor, read.target or 0.0]
    numbers += [] if read.params is None else [x for x in read.params if x is not None]
    assert all(math.isfinite(x) and x >= 0 for x in numbers)
    assert read.limits.initial <= read.limits.maximum
    for name in ("batch_initial", "batch_maximum", "local_min", "local_max", "gpus", "nodes", "accumulation"):
        assert 0 <= row[name] < 2**31
    assert len(json.dumps(row)) < 8000, "the inbox of a job is bounded"


def test_a_row_has_every_column_of_the_table_that_a_report_fills():
    from polluxd.store.sqlfiles import schema

    table = schema().split("CREATE TABLE pollux.report_history (")[1].split("\n);")[0]
    columns = {line.split()[0] for line in table.splitlines() if line.strip()}
    of_attempt = {"id", "cluster", "job_id", "attempt", "uid", "at", "received_at", "wakes"}
    assert set(ReportMessage.model_validate_json(json.dumps(payload())).row()) == columns - of_attempt


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"goodput": -1}, "goodput"),
        ({"goodput": "NaN"}, "goodput"),
        ({"goodput": float("nan")}, "goodput"),
        ({"goodput": float("inf")}, "goodput"),
        ({"goodput": None}, "goodput"),
        ({"goodput": True}, "goodput"),
        ({"goodput": 1e13}, "goodput"),
        ({"noise": {"sqr": -1e-9, "var": 1}}, "sqr"),
        ({"noise": {"sqr": 1}}, "var"),
        ({"noise": 3}, "noise"),
        ({"params": {"alpha_grad": 1}}, "beta_grad"),
        ({"limits": None}, "limits"),
        ({"limits": {"initial": 32, "maximum": 16, "local_min": 1, "local_max": 8}}, "limits"),
        ({"limits": {"initial": 1.6, "maximum": 1.7, "local_min": 1, "local_max": 8}}, "initial"),
        ({"gpus": -1}, "gpus"),
        ({"gpus": 1.5}, "gpus"),
        ({"at": "now"}, "at"),
        ({"at": time.time() + 3600}, "at"),
        ({"checkpointed": "yes"}, "checkpointed"),
        ({"checkpointed": 1}, "checkpointed"),
        ({"prior_refuted": "true"}, "prior_refuted"),
        ({"times": [1]}, "times"),
        ({"times": {"launched_at": -1}}, "launched_at"),
        ({"times": {"launched_at": "1"}}, "launched_at"),
        ({"times": {"launched_at": time.time() + 3600}}, "launched_at"),
        ({"times": {"x" * 1000: 1}}, "times"),
        ({"v": 2}, "v"),
        ({"mode": "rule"}, "mode"),
        ({"advice": "double it"}, "advice"),
        ({"advice": ADVICE | {"batch_size": 0}}, "batch_size"),
        ({"advice": ADVICE | {"goodput_ratio": None}}, "goodput_ratio"),
        ({"prior_gpus": -1}, "prior_gpus"),
        ({"prior_refuted": 1}, "prior_refuted"),
        ({"measured_gpus": "4"}, "measured_gpus"),
        ({"resize": "fast"}, "resize"),
        ({"gpu_type": "\x1b"}, "gpu_type"),
        ({"gpu_type": "x" * 65}, "gpu_type"),
        ({"gpu_type": "a\nb"}, "gpu_type"),
        ({"resized": -1}, "resized"),
        ({"resized": "7"}, "resized"),
        ({"resize_cost": -0.5}, "resize_cost"),
        ({"resize_refused": "no"}, "resize_refused"),
        ({"resize_refused": {"why": "no"}}, "id"),
        ({"data_wait": 1.5}, "data_wait"),
        ({"search_rank": 1.5}, "search_rank"),
        ({"search_rank": -0.1}, "search_rank"),
        ({"padding": 1}, "padding"),
    ],
)
def test_a_faulty_member_is_named(change, named):
    with pytest.raises(ValidationError) as caught:
        ReportMessage.model_validate_json(json.dumps(payload(**change)))
    assert named in {part for fault in caught.value.errors() for part in fault["loc"]}


@pytest.mark.parametrize("gamma", [0.99, 10.01])
def test_gamma_is_bounded(gamma):
    body = payload()
    body["params"]["gamma"] = gamma
    with pytest.raises(ValidationError, match="gamma"):
        ReportMessage.model_validate_json(json.dumps(body))


def test_a_fit_has_both_parameters_of_racks_or_none():
    body = payload()
    body["params"]["alpha_rack"] = 1.0
    with pytest.raises(ValidationError, match="none of them"):
        ReportMessage.model_validate_json(json.dumps(body))
    body["params"]["beta_rack"] = 1.0
    assert ReportMessage.model_validate_json(json.dumps(body)).row()["beta_rack"] == 1.0


def test_the_words_of_a_refusal_are_one_line_of_bounded_length():
    body = payload(resize_refused={"id": 5, "why": "sbatch is\nforbidden\x00 " + "x" * 400})
    why = ReportMessage.model_validate_json(json.dumps(body)).row()["resize_refused"]["why"]
    assert why.startswith("sbatch is forbidden  xx")
    assert len(why) == 300


def test_other_messages_are_bounded():
    Acknowledgement(move=1, step=1.0)
    for wrong in ({"move": 0}, {"move": "1"}, {"move": 1, "last_step_at": -1}, {"move": 1, "step": 1e16}, {}):
        with pytest.raises(ValidationError):
            Acknowledgement.model_validate_json(json.dumps(wrong))
    for fingerprint in ("", "short", "g" * 16, "A" * 16, "a" * 65, "a" * 16 + "\n", 5):
        with pytest.raises(ValidationError):
            TrainingMessage.model_validate_json(json.dumps({"fingerprint": fingerprint}))
    for credential in ("", "x", "MUNGE:a:\n", "MUNGE:" + "a" * 2100 + ":", None):
        with pytest.raises(ValidationError):
            TokenRequest.model_validate_json(json.dumps({"credential": credential}))
