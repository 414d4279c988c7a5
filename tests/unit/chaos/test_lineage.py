"""The chaos run's verdict on the samples of a training.

The verdict says which of the trained samples live on in the training's last state.
"""

from __future__ import annotations

from pathlib import Path

from contrib.chaos.ledger import SAMPLES, Lineage, ledgers, lineage
from contrib.chaos.workload import LARGE, SMALL, trainings

LAUNCHES = 1_000_000_000

Steps = list[tuple[int, list[int]]]


def write(
    folder: Path, launch: int, rank: int, start: int, steps: Steps, end: str = "", began: str = "from"
) -> None:
    """Write a rank's ledger.

    A step is over once its one micro-batch is over. The exception is the last step of a file with an `end`.
    """
    lines = [f"{began} {start} of {SAMPLES} in {1000 + 10 * launch + rank}"]
    for step, indices in steps:
        lines.append(" ".join(map(str, (step, *indices))))
        if not end or step < steps[-1][0]:
            lines.append(f"done {step} {launch + step / 1000} {2 if began == 'from' else 3}")
    (folder / f"{LAUNCHES + launch}-0-{rank}.txt").write_text("\n".join(lines) + "\n" + end)


def found(folder: Path) -> Lineage:
    return lineage(ledgers(folder))


def passes(count: int, ranks: int = 2) -> list[Steps]:
    """Steps of four samples for each rank, over all samples `count` times."""
    order = [i for _ in range(count) for i in range(SAMPLES)]
    step_of = [order[at : at + 4 * ranks] for at in range(0, len(order), 4 * ranks)]
    return [[(s, taken[4 * r : 4 * r + 4]) for s, taken in enumerate(step_of)] for r in range(ranks)]


def test_an_undisturbed_training_is_flat(tmp_path: Path) -> None:
    for rank, steps in enumerate(passes(2)):
        write(tmp_path, 1, rank, 0, steps)
    told = found(tmp_path)
    assert (told.launches, told.undone, told.repeated, told.faults(2)) == (1, 0, 0, [])
    assert "not seen 3 times" in told.faults(3)[0]


def test_what_a_crash_undid_does_not_count(tmp_path: Path) -> None:
    one, two = passes(1)
    write(tmp_path, 1, 0, 0, one[:60], end="60 17")  # cut off in mid-line
    write(tmp_path, 1, 1, 0, two[:59])
    write(tmp_path, 2, 0, 50, one[50:70])  # back to the checkpoint of step 50
    write(tmp_path, 2, 1, 50, two[50:70])
    write(tmp_path, 3, 0, 40, one[40:])  # that launch's own checkpoint was lost too
    write(tmp_path, 3, 1, 40, two[40:])
    told = found(tmp_path)
    assert told.faults(1) == []
    assert told.launches == 3
    assert told.undone == 4 * (20 + 19 + 20 + 20)
    assert told.repeated == 19 + 20  # of the first, steps 40 to 58; of the second, all


def test_ranks_that_join_undo_nothing_and_what_they_took_is_undone_with_the_others(tmp_path: Path) -> None:
    two_ranks, three_ranks = passes(1), passes(1, ranks=3)
    # Ranks 0 and 1 up to step 60; rank 2 joins, from a companion job, where they are.
    at = 60 * 8 // 12
    for rank in range(2):
        write(tmp_path, 1, rank, 0, two_ranks[rank][:60] + renumbered(three_ranks[rank][at:], 60))
    write(tmp_path, 2, 2, 60, renumbered(three_ranks[2][at:], 60), began="joined")
    told = found(tmp_path)
    assert (told.faults(1), told.launches, told.undone, told.repeated) == ([], 1, 0, 0)
    assert [ledger.sizes() for ledger in ledgers(tmp_path)] == [[2], [2], [3]]
    # Its node fails ten steps later: the others begin again, at the checkpoint of step 65.
    rest = rest_in_two(three_ranks, at + 5)
    for rank in range(2):
        write(tmp_path, 1, rank, 0, two_ranks[rank][:60] + renumbered(three_ranks[rank][at : at + 10], 60))
        write(tmp_path, 3, rank, 65, renumbered(rest[rank], 65))
    write(tmp_path, 2, 2, 60, renumbered(three_ranks[2][at : at + 10], 60), began="joined")
    told = found(tmp_path)
    assert (told.faults(1), told.launches, told.repeated) == ([], 2, 5)
    assert told.undone == 3 * 5 * 4


def renumbered(steps: Steps, first: int) -> Steps:
    return [(first + i, indices) for i, (_, indices) in enumerate(steps)]


def rest_in_two(ranks: list[Steps], at: int) -> list[Steps]:
    """What three ranks have left from step `at` on, in steps of two."""
    left = [
        i for step in zip(*(steps[at:] for steps in ranks), strict=True) for _, some in step for i in some
    ]
    taken = [left[i : i + 8] for i in range(0, len(left), 8)]
    return [[(s, some[4 * r : 4 * r + 4]) for s, some in enumerate(taken)] for r in range(2)]


def test_a_sample_left_out_or_taken_twice_is_told(tmp_path: Path) -> None:
    one, two = passes(1)
    write(tmp_path, 1, 0, 0, one[:50])
    write(tmp_path, 1, 1, 0, two[:50])
    write(tmp_path, 2, 0, 51, one[51:])  # step 50 is in neither launch
    write(tmp_path, 2, 1, 51, two[51:])
    assert "8 samples not seen 1 times" in found(tmp_path).faults(1)[0]
    write(tmp_path, 2, 0, 51, [(51, [0]), *one[51:]])
    assert "9 samples" in found(tmp_path).faults(1)[0]


def test_a_training_that_never_began_is_told(tmp_path: Path) -> None:
    assert found(tmp_path).faults(1) == ["it never trained"]


def test_arrivals_are_of_the_seed_and_leave_time_to_end() -> None:
    jobs = trainings(20, 60.0, 7)
    assert jobs == trainings(20, 60.0, 7) != trainings(20, 60.0, 8)
    assert len(jobs) == 20
    assert 0.0 <= jobs[0].at_s <= jobs[-1].at_s <= 2400.0
    assert [job.directive for job in jobs[:3]] == [LARGE, SMALL, LARGE]
