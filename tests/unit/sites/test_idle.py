"""GPU-seconds that stay idle while a job could use them."""

from __future__ import annotations

from contrib.sites.idle import Measured, Seen, Wish, read_jobs, read_nodes

FREE = {"n1": 4, "n2": 2}


def idle(wish: Wish, *seen: Seen, free: dict[str, int] | None = None) -> int:
    return Measured({7: wish}).note(seen, FREE if free is None else free, 1.0)


def test_a_waiting_job_that_fits_counts() -> None:
    waits = Seen(7, "PENDING", 2)
    assert idle(Wish(2), waits) == 2
    assert idle(Wish(3, on=frozenset({"n2"})), waits) == 0, "its nodes have too few"
    assert idle(Wish(2, nodes=2), waits) == 4
    assert idle(Wish(3, nodes=2), waits) == 0
    assert idle(Wish(2, barred=True), waits) == 0, "the site forbids its start"
    assert idle(Wish(2), Seen(7, "RUNNING", 2)) == 0
    assert idle(Wish(2), Seen(8, "PENDING", 2)) == 0, "no job of the case"


def test_tasks_of_an_array_count_up_to_its_limit() -> None:
    tasks = [Seen(7, "PENDING", 1)] * 5 + [Seen(7, "RUNNING", 1)] * 2
    assert idle(Wish(1, at_once=4), *tasks) == 2
    assert idle(Wish(1, at_once=4), *tasks, free={"n1": 1}) == 1


def test_gpus_taken_from_a_job_count_even_where_it_may_not_start_again() -> None:
    measured = Measured({7: Wish(1, barred=True)})
    assert measured.note([Seen(7, "RUNNING", 6)], {"n1": 0}, 1.0) == 0
    assert measured.note([Seen(7, "RUNNING", 2)], {"n1": 3}, 2.0) == 3, "it shrank, and nobody took all"
    assert measured.note([Seen(7, "PENDING", 1)], {"n1": 4, "n2": 4}, 1.0) == 6
    assert measured.note([Seen(7, "PENDING", 1)], {"n1": 0, "n2": 0}, 1.0) == 0, "others use them"
    assert (measured.gpu_s, measured.longest_s) == (12.0, 3.0)


def test_records_of_squeue_and_scontrol_are_read() -> None:
    text = "7|RUNNING|2|gres:gpu:4|a\n8|RUNNING|1|gres/gpu:2080ti:2|a.companion\n9|PENDING|1|N/A|b\n"
    assert read_jobs(text) == [Seen(7, "RUNNING", 8), Seen(7, "RUNNING", 2), Seen(9, "PENDING", 0)]
    nodes = (
        "NodeName=n1 Gres=gpu:2080ti:4 GresUsed=gpu:2080ti:1(IDX:0) State=MIXED\n"
        "NodeName=n2 Gres=gpu:4 GresUsed=gpu:0(IDX:N/A) State=IDLE+DRAIN\n"
        "NodeName=n3 Gres=gpu:1g.5gb:4 GresUsed=gpu:1g.5gb:0 State=IDLE\n"
    )
    assert read_nodes(nodes) == {"n1": 3, "n2": 0, "n3": 4}
