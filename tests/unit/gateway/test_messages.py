"""What the models refuse; `tests/fuzz/test_reports.py` stores and reads what they accept."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, fields

import pytest
from pydantic import ValidationError

from pollux.parameters import BatchLimits
from polluxd.gateway.payloads import Acknowledgement, ReportMessage, TokenRequest, TrainingMessage
from polluxd.model import Report
from tests.integration.store.reports import payload

ADVICE = {"batch_size": 256, "local_batch": 64, "accumulation": 0, "goodput_ratio": 1.25}


def sent(**changes) -> ReportMessage:
    return ReportMessage.model_validate_json(json.dumps(payload(**changes)))


def test_a_report_of_the_model_has_its_members_from_the_message():
    ours = {
        "attempt",
        "first_step_at",
        "params_by_type",
        "assumed_types",
        "refused",
        "refused_why",
        "most_gpus",
    }
    assert {field.name for field in fields(Report)} - ours <= set(ReportMessage.model_fields)


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
        ({"gpu_type": "h100é"}, "gpu_type"),
        ({"local_max_by_type": {"a" * n: 1 for n in range(9)}}, "local_max_by_type"),
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
        sent(**change)
    assert named in {part for fault in caught.value.errors() for part in fault["loc"]}


@pytest.mark.parametrize("gamma", [0.99, 10.01])
def test_gamma_is_bounded(gamma):
    with pytest.raises(ValidationError, match="gamma"):
        sent(params=payload()["params"] | {"gamma": gamma})


def test_a_fit_has_both_parameters_of_racks_or_none():
    params = payload()["params"] | {"alpha_rack": 1.0}
    with pytest.raises(ValidationError, match="none of them"):
        sent(params=params)
    assert sent(params=params | {"beta_rack": 1.0}).document()["params"]["beta_rack"] == 1.0


def test_the_words_of_a_refusal_are_one_line_of_bounded_length():
    refusal = {"id": 5, "why": "sbatch;is\nforbidden\x00 " + "x" * 400}
    wide = sent(resize_refused={"id": 5, "why": "é" * 400}).document()["resize_refused"]["why"]
    assert len(wide.encode()) == 300
    why = sent(resize_refused=refusal).document()["resize_refused"]["why"]
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


def test_every_limit_that_an_agent_sends_is_taken() -> None:
    limits = asdict(BatchLimits(32, 64, 1, 32, halves=True))
    assert sent(limits=limits).document()["limits"] == limits
