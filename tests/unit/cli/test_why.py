"""An explanation's data in words."""

from __future__ import annotations

import pytest

from polluxd.cli.why import sentences, with_node_more
from polluxd.model import Allocation, Explanation, Placement


@pytest.mark.parametrize(
    ("racks", "one_rack", "words"),
    [
        (0, 0.0, None),
        (1, 0.0, "Its nodes lie in one rack."),
        (2, 150.0, "Its nodes lie in 2 racks; as many in one rack would bring it 150 examples/s, +50 %."),
        (3, 0.0, "Its nodes lie in 3 racks; it was not measured over racks yet."),
    ],
)
def test_racks(racks, one_rack, words):
    told = Explanation(1, 4, 1.0, "goodput", racks=racks, one_rack=one_rack)
    placed = Allocation(7, Placement(("a", "b"), 4), 100.0, 1.0, 64, True, "starts", told)
    said = [s for s in sentences(placed, [placed], None) if "rack" in s]
    assert said == ([] if words is None else [words])


def placed(gpus, **told):
    place = Placement(("a",), gpus) if gpus else Placement()
    return Allocation(
        7, place, 100.0, 1.0, 64, True, "starts", Explanation(1, 4, 1.0, "contention", 8, **told)
    )


def test_the_price_of_a_gpu_what_the_next_one_brings_and_when_the_job_ends():
    said = sentences(placed(4, gpu_price=0.75, marginal=0.5, seconds_left=7200.0), [], None)
    assert (
        "A GPU costs 0.750 s of all jobs' completion times per second now, its next one would bring 0.500 s, "
        "at its planned goodput it ends in 2h00m."
    ) in said
    assert not [s for s in sentences(placed(4), [], None) if "costs 0" in s or "ends in" in s]


def test_what_one_node_more_would_change():
    assert with_node_more(placed(4), placed(8, seconds_left=3600.0)) == (
        "With one node more it would get 8 GPUs instead of 4 and end in 1h00m."
    )
    assert "no other number of GPUs than 4" in with_node_more(placed(4), placed(4))
    assert with_node_more(placed(4), None) == ""
