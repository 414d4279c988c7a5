"""Which decisions are the same."""

from __future__ import annotations

import math
from dataclasses import replace
from hashlib import sha256

import pytest

from polluxd.model import NO_PLACEMENT, Allocation, Explanation, Placement
from polluxd.store.rows import allocations_to_json
from polluxd.store.written import Written, plan_digest, same_decision

WHY = Explanation(fair_nodes=1, fair_gpus=2, weight=1.0, limit="contention", price=0.5, taken_by=9)
STAYS = Allocation(7, Placement(("n1",), 4), 100.0, 1.5, 128, False, "stays: 8 GPUs would bring 5.2 %", WHY)


@pytest.mark.parametrize(
    "changes",
    [
        {"goodput": 105.0},
        {"speedup": 1.45},
        {"batch_size": 132},
        {"reason": "stays: 16 GPUs would bring 11 %"},
        {"explanation": replace(WHY, price=0.7, taken_by=3)},
    ],
)
def test_what_drifts_is_the_same_decision(changes):
    assert same_decision(STAYS, replace(STAYS, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"placement": Placement(("n2",), 4)},
        {"placement": NO_PLACEMENT},
        {"goodput": 112.0},
        {"goodput": math.inf},
        {"goodput": math.nan},
        {"speedup": 0.0},
        {"batch_size": 256},
        {"changed": True},
        {"reason": "waits"},
        {"explanation": replace(WHY, limit="goodput")},
        {"explanation": replace(WHY, next_gpus=8)},
        {"explanation": replace(WHY, doubts=("gpus",))},
        {"explanation": None},
    ],
)
def test_what_its_user_would_notice_is_another_decision(changes):
    assert not same_decision(STAYS, replace(STAYS, **changes))


def test_small_changes_add_up():
    written = Written(1)
    goodputs = [100.0, 106.0, 112.0, 118.0]
    changed = [written.decide([replace(STAYS, goodput=g)])[0] for g in goodputs]
    assert [[a.goodput for a in each] for each in changed] == [[100.0], [], [112.0], []]


def test_a_job_outside_the_plan_has_no_decision_any_more():
    written = Written(1)
    assert written.decide([STAYS, replace(STAYS, job_id=8)])[1] == [7, 8]
    assert written.decide([STAYS]) == ([], [8])
    assert written.decide([STAYS, replace(STAYS, job_id=8)]) == ([replace(STAYS, job_id=8)], [8])


def test_another_epoch_knows_nothing():
    written = Written(1, {7: {}}, {7: STAYS})
    assert written.under(1) is written
    assert written.under(2) == Written(2)
    assert written.under(None) == Written(None)
    assert Written(None, {7: {}}).under(None) == Written(None)


def test_a_digest_tells_every_bit_and_no_order():
    other = replace(STAYS, job_id=8)
    assert plan_digest([STAYS, other]) == plan_digest([other, STAYS])
    assert plan_digest([STAYS]) != plan_digest([replace(STAYS, goodput=math.nextafter(100.0, 200.0))])
    both = allocations_to_json([STAYS, replace(other, goodput=math.inf)])
    assert plan_digest([replace(other, goodput=math.inf), STAYS]) == sha256(both.encode()).hexdigest()
