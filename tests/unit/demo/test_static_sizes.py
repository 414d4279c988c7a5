"""The best static sizes, against every combination of sizes, and the model of plain Slurm against schedules by hand."""

from __future__ import annotations

from itertools import product
from statistics import fmean

import pytest

from contrib.demo.static_sizes import best_static, completions
from contrib.demo.workload import Size, Workload, WorkloadError, load
from tests.unit.demo.trainings import training

ONE, TWO, FOUR, EIGHT = (Size(nodes, gpus, 64, 1.0, 0.1) for nodes, gpus in ((1, 1), (1, 2), (1, 4), (2, 4)))


def work(*arrivals, nodes=2):
    jobs = tuple(training(name=f"j{i}", arrive_s=float(at)) for i, at in enumerate(arrivals))
    return Workload(nodes, 4, 300.0, jobs)


def test_jobs_wait_in_order_and_a_short_one_fills_a_gap():
    sizes = {"j0": FOUR, "j1": EIGHT, "j2": TWO, "j3": TWO}
    seconds = {"j0": {FOUR: 100.0}, "j1": {EIGHT: 50.0}, "j2": {TWO: 60.0}, "j3": {TWO: 95.0}}
    found = completions(work(0, 1, 2, 10), sizes, seconds)
    # j1 needs both nodes: from 100 to 150. j2 ends before that beside j0; j3 would delay j1, and waits.
    assert found == {"j0": 100.0, "j1": 149.0, "j2": 60.0, "j3": 235.0}


def test_a_job_that_no_cluster_can_hold_is_an_error():
    with pytest.raises(ValueError, match="no room for 2 nodes of 4"):
        completions(work(0, nodes=1), {"j0": EIGHT}, {"j0": {EIGHT: 1.0}})


@pytest.mark.parametrize("seed", range(8))
def test_the_search_finds_what_all_combinations_have(seed):
    some = work(*(3 * seed * i % 50 for i in range(4)))
    seconds = {
        job.name: {ONE: 100.0 + 9 * i * seed % 40, TWO: 60.0 + 7 * i, FOUR: 40.0 + 3 * i, EIGHT: 33.0 + i}
        for i, job in enumerate(some.trainings)
    }
    starts = [dict.fromkeys(seconds, size) for size in (ONE, TWO, FOUR)]

    def mean_jct(sizes):
        return fmean(completions(some, sizes, seconds).values())

    best = min(
        mean_jct(dict(zip(seconds, sizes, strict=True)))
        for sizes in product((ONE, TWO, FOUR, EIGHT), repeat=4)
    )
    assert mean_jct(best_static(some, seconds, starts)) <= 1.05 * best


def test_a_training_may_be_like_an_earlier_one(tmp_path):
    path = tmp_path / "work.toml"
    one = "name = 'a'\nscript = 's'\narrive_s = 0\nepochs = 1\nbatch_size = 8\nmax_batch_size = 8\n"
    one += "per_gpu = [1, 8]\nlr = 1.0\nalpha_s = 0.1\nbeta_s = 0.1\nsync_local_s = 0\nsync_node_s = 0\n"
    head = "limit_s = 1\n[cluster]\nnodes = 1\ngpus_per_node = 1\n"
    path.write_text(f"{head}[[training]]\n{one}[[training]]\nname = 'b'\nlike = 'a'\nepochs = 3\n")
    first, second = load(path).trainings
    assert (second.name, second.epochs, second.per_gpu) == ("b", 3, first.per_gpu)
    path.write_text(f"{head}[[training]]\nlike = 'c'\n{one}")
    with pytest.raises(WorkloadError, match="like = 'c': expected an earlier training's name"):
        load(path)
