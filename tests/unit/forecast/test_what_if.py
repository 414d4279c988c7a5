"""One node more: what a job would get of it."""

from __future__ import annotations

from polluxd.forecast.what_if import one_node_more
from tests.build import job, node, nodes, report, running, snapshot


def test_a_job_gets_the_node_that_is_added_where_it_could_use_it():
    left = report(explored=16, progress=0.0, target=1e5)
    snap = snapshot(nodes(1), [running(1, ["n000"], 4, report=left)], objective="completion-time")
    more = one_node_more(snap, 1)
    assert more.placement.gpus == 8
    assert more.explanation.seconds_left > 0


def test_a_node_of_the_right_partition_is_added_even_where_its_model_is_full_or_down():
    members = [node("n000", partitions=frozenset({"side"})), node("n001", foreign_gpus=4, schedulable=False)]
    assert one_node_more(snapshot(members, [job(1, report=report())]), 1).placement.gpus == 4


def test_unknown_jobs_and_partitions_without_nodes_have_no_answer():
    snap = snapshot(nodes(1), [job(1, partition="elsewhere")])
    assert one_node_more(snap, 1) is None
    assert one_node_more(snap, 9) is None


def test_a_node_without_gpus_is_no_model_for_one_more():
    alone = [job(1, report=report())]
    assert one_node_more(snapshot([node("a000", gpus=0), node("n000")], alone), 1).placement.gpus == 8
    assert one_node_more(snapshot([node("a000", gpus=0)], alone), 1) is None
