"""The chaos run's verdict: which of the samples that were trained on live on in a training's last state."""

from __future__ import annotations

from pathlib import Path

from contrib.chaos.workload import SAMPLES, lineage, trainings

LAUNCHES = 1_000_000_000


def write(
    folder: Path, launch: int, rank: int, start: int, steps: list[tuple[int, list[int]]], end: str = ""
) -> None:
    lines = [f"from {start} of {SAMPLES}"]
    lines += [" ".join(map(str, (step, *indices))) for step, indices in steps]
    (folder / f"{LAUNCHES + launch}-0-{rank}.txt").write_text("\n".join(lines) + "\n" + end)


def passes(count: int, ranks: int = 2) -> list[list[tuple[int, list[int]]]]:
    """Steps of four samples for each rank, over all samples `count` times."""
    order = [i for _ in range(count) for i in range(SAMPLES)]
    step_of = [order[at : at + 4 * ranks] for at in range(0, len(order), 4 * ranks)]
    return [[(s, taken[4 * r : 4 * r + 4]) for s, taken in enumerate(step_of)] for r in range(ranks)]


def test_an_undisturbed_training_is_flat(tmp_path: Path) -> None:
    for rank, steps in enumerate(passes(2)):
        write(tmp_path, 1, rank, 0, steps)
    found = lineage(tmp_path)
    assert (found.launches, found.undone, found.faults(2)) == (1, 0, [])
    assert "not seen 3 times" in found.faults(3)[0]


def test_what_a_crash_undid_does_not_count(tmp_path: Path) -> None:
    one, two = passes(1)
    write(tmp_path, 1, 0, 0, one[:60], end="60 17")  # cut off in mid-line
    write(tmp_path, 1, 1, 0, two[:59])
    write(tmp_path, 2, 0, 50, one[50:70])  # back to the checkpoint of step 50
    write(tmp_path, 2, 1, 50, two[50:70])
    write(tmp_path, 3, 0, 40, one[40:])  # that launch's own checkpoint was lost too
    write(tmp_path, 3, 1, 40, two[40:])
    found = lineage(tmp_path)
    assert found.faults(1) == []
    assert found.launches == 3
    assert found.undone == 4 * (20 + 19 + 20 + 20)


def test_a_sample_left_out_or_taken_twice_is_told(tmp_path: Path) -> None:
    one, two = passes(1)
    write(tmp_path, 1, 0, 0, one[:50])
    write(tmp_path, 1, 1, 0, two[:50])
    write(tmp_path, 2, 0, 51, one[51:])  # step 50 is in neither launch
    write(tmp_path, 2, 1, 51, two[51:])
    assert "8 samples not seen 1 times" in lineage(tmp_path).faults(1)[0]
    write(tmp_path, 2, 0, 51, [(51, [0]), *one[51:]])
    assert "9 samples" in lineage(tmp_path).faults(1)[0]


def test_a_training_that_never_began_is_told(tmp_path: Path) -> None:
    assert lineage(tmp_path).faults(1) == ["it never trained"]


def test_arrivals_are_of_the_seed_and_leave_time_to_end() -> None:
    jobs = trainings(20, 60.0, 7)
    assert jobs == trainings(20, 60.0, 7) != trainings(20, 60.0, 8)
    assert len(jobs) == 20
    assert 0.0 <= jobs[0].at_s <= jobs[-1].at_s <= 2400.0
