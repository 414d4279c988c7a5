"""An explanation's data in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from polluxd.cli.story import sentences, with_node_more
from polluxd.model import Allocation, Explanation, Placement


@pytest.mark.parametrize(
    ("racks", "one_rack", "words"),
    [
        (0, 0.0, None),
        (1, 0.0, "The nodes are in one rack."),
        (2, 150.0, "The nodes are in 2 racks. As many nodes in one rack would bring 150 examples/s (+50 %)."),
        (3, 0.0, "The nodes are in 3 racks. The job was not measured across racks yet."),
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
    said = list(sentences(placed(4, gpu_price=0.75, marginal=0.5, seconds_left=7200.0), [], None))
    assert said[2:] == [
        "Next larger size: 8 GPUs, goodput 0 examples/s (-100 % against 100).",
        "One more GPU is worth 0.500 to this job.",
        "The job has not run yet: starting it costs nothing.",
        "A GPU now costs 0.750: in each second it takes so many seconds off all jobs' completion times, added up.",
        "At the planned goodput the job ends in 2h00m.",
    ]
    assert not [s for s in sentences(placed(4), [], None) if "now costs" in s or "ends in" in s]


def test_a_waiting_job_is_told_when_it_ends_after_its_wait():
    said = sentences(placed(0, seconds_left=7200.0), [], None)
    assert "If the jobs before it end as predicted, the job gets GPUs and ends in 2h00m." in said


def test_what_one_node_more_would_change():
    assert with_node_more(placed(4), placed(8, seconds_left=3600.0)) == (
        "With one more node in the cluster the job would get 8 GPUs instead of 4 and end in 1h00m."
    )
    assert "would still get 4 GPUs" in with_node_more(placed(4), placed(4))


def test_the_readme_shows_what_explain_prints():
    told = Explanation(
        1, 4, 1.0, "contention", 8, 2240.0, 0.11, 0.19, 1235, move_factor=0.98, move_seconds=9.0
    )
    job = Allocation(1234, Placement(("n1",), 4), 1310.0, 1.1, 512, False, "", told)
    other = Allocation(1235, Placement(("n2", "n3"), 4), 3000.0, 1.4, 512, False, "")
    readme = " ".join((Path(__file__).parents[3] / "README.md").read_text().split())
    for sentence in sentences(job, [job, other], 16):
        assert sentence in readme
