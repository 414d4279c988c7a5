"""An explanation's data in words."""

from __future__ import annotations

import pytest

from polluxd.cli.why import sentences
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
