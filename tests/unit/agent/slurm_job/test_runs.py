"""Which training a `pollux run` of a job goes on with, in each attempt of batch scripts of many kinds."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from pollux.errors import LaunchError
from pollux.slurm_job import runs as record
from pollux.slurm_job.runs import present_run


class Job:
    """A job whose batch script calls `pollux run`; a death interrupts the last call of an attempt."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.attempt = folder, 0

    def runs(self, *calls: str, dies: bool = True, **variables: Iterable[str]) -> list[str]:
        """One attempt: the names that its calls get; each variable has a value for each call."""
        names = []
        columns = {name: list(values) for name, values in variables.items()}
        for place, call in enumerate(calls):
            environ = {name: values[place] for name, values in columns.items()}
            run = present_run(call.split(), str(self.attempt), None, environ)
            # A process that is gone, as every one of an earlier call.
            run = replace(run, process=f"{run.process}-{self.attempt}-{place}")
            names.append(record.begin(self.folder, run)[0])
            if place < len(calls) - 1 or not dies:
                record.end(self.folder, run.process, 0)
        self.attempt += 1
        return names


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "7-1700000000")


def seeds(*numbers: int) -> list[str]:
    return [f"train.py --seed {number}" for number in numbers]


def test_one_training_keeps_the_folder_of_its_job(job: Job) -> None:
    assert [job.runs("train.py") for _ in range(3)] == [[""]] * 3


def test_a_loop_over_seeds_finds_each_of_its_trainings_again(job: Job) -> None:
    assert job.runs(*seeds(1, 2)) == ["", "2"]
    assert job.runs(*seeds(1, 2, 3)) == ["", "2", "3"]
    assert job.runs(*seeds(1, 2, 3), dies=False) == ["", "2", "3"]


def test_a_script_that_skips_what_it_has_done_finds_the_interrupted_one(job: Job) -> None:
    job.runs(*seeds(1, 2))
    assert job.runs(*seeds(2, 3)) == ["2", "3"]
    assert job.runs(*seeds(3, 4), dies=False) == ["3", "4"]


def test_one_command_line_counts_by_itself(job: Job) -> None:
    calls = ["train.py", "evaluate.py", "train.py", "train.py"]
    assert job.runs(*calls) == ["", "2", "3", "4"]
    assert job.runs("train.py", "train.py", "train.py", "evaluate.py") == ["", "3", "4", "2"]


def test_a_seed_in_a_variable_tells_trainings_apart(job: Job) -> None:
    """Also where the script skips those that it has done, and where the first is alone in its attempt."""
    assert job.runs("train.py", SEED="1") == [""]
    assert job.runs("train.py", "train.py", SEED="12") == ["", "2"]
    assert job.runs("train.py", "train.py", SEED="23") == ["2", "3"]
    assert job.runs("train.py", "train.py", SEED="34", dies=False) == ["3", "4"]


def test_variables_that_differ_between_attempts_alone_tell_nothing(job: Job) -> None:
    same = {"STAMP": "aa", "MASTER_PORT": "12"}
    assert job.runs("train.py", "train.py", **same) == ["", "2"]
    assert job.runs("train.py", "train.py", STAMP="bb", MASTER_PORT="34") == ["", "2"]


@pytest.mark.parametrize("form", ["train.py --out out-{}", "train.py --attempt {}"])
def test_a_command_line_of_its_attempt_goes_on_where_it_was(job: Job, form: str) -> None:
    for attempt in range(3):
        assert job.runs(form.format(attempt)) == [""]


def test_a_word_that_a_restart_adds_changes_no_training(job: Job) -> None:
    assert job.runs(*seeds(1, 2)) == ["", "2"]
    again = [f"{each} --resume" for each in seeds(1, 2, 3)]
    assert job.runs(*again) == ["", "2", "3"]


def test_a_loop_with_the_time_of_its_attempt_finds_all_again(job: Job) -> None:
    assert job.runs("prepare.py", "train.py --seed 1 --at 10:00", "train.py --seed 2 --at 10:00") == [
        "",
        "2",
        "3",
    ]
    assert job.runs("prepare.py", "train.py --seed 1 --at 11:00", "train.py --seed 2 --at 11:00") == [
        "",
        "2",
        "3",
    ]


def test_what_cannot_be_told_apart_is_refused_and_says_what_to_write(job: Job) -> None:
    """Each call has its time in it; seeds come in another order; the time of day alone after the training has ended."""
    job.runs("train.py --seed 1 --at 10:00", "train.py --seed 2 --at 10:30")
    with pytest.raises(LaunchError, match=r"cannot be told .*pollux run --name"):
        job.runs("train.py --seed 1 --at 11:00")
    other = Job(job.folder.with_name("8"))
    other.runs(*seeds(1, 3))
    with pytest.raises(LaunchError, match="--name"):
        other.runs(*seeds(2))
    ended = Job(job.folder.with_name("9"))
    ended.runs("train.py --at 10:00", dies=False)
    with pytest.raises(LaunchError, match="--name"):
        ended.runs("train.py --at 11:00")
    volatile = Job(job.folder.with_name("10"))
    volatile.runs("train.py", "train.py", STAMP="ab")
    with pytest.raises(LaunchError, match="STAMP differ"):
        volatile.runs("train.py", STAMP="c")


def test_a_script_that_tries_again_goes_on_with_the_same_training(job: Job) -> None:
    def begin(number: int) -> str:
        run = present_run(["train.py"], "0", None, {})
        run = replace(run, process=f"gone:{number}")
        name = record.begin(job.folder, run)[0]
        record.end(job.folder, run.process, [1, 143, 0, 1][number])
        return name

    assert [begin(number) for number in range(4)] == ["", "", "", "2"]


def test_by_hand_each_command_line_is_a_training_and_is_called_again_to_go_on(job: Job) -> None:
    """Outside of Pollux jobs: a person calls; a folder is exported once."""

    def begin(words: str, attempt: str, status: int | None = 0, name: str | None = None) -> tuple[str, str]:
        run = present_run(words.split(), attempt, name, {})
        run = replace(run, process=f"gone:{words}:{attempt}")
        found = record.begin(job.folder, run, by_hand=True)[:2]
        if status is not None:
            record.end(job.folder, run.process, status)
        return found

    assert begin("train.py --seed 1", "a") == ("", "")
    name, sentence = begin("train.py --seed 2", "a", status=None)
    assert name == "2"
    assert "another training than `train.py --seed 1`" in sentence
    assert [begin(each, "b")[0] for each in seeds(2, 3, 1, 3)] == ["2", "3", "", "3"]
    assert begin("train.py --seed 1 --epochs 9", "c", name="first") == ("", "")


def test_an_attempt_that_finds_nothing_of_those_before_says_so(job: Job) -> None:
    run = replace(present_run(["train.py"], "3", None, {}), process="gone")
    name, sentence, alone = record.begin(job.folder, run)
    assert (name, alone) == ("", True)
    assert "BEGINS FROM ITS START" in sentence
    assert record.begin(job.folder, replace(run, attempt="4", process="gone too"))[1:] == ("", False)


def test_the_directory_is_part_of_a_command(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / name for name in ("a", "b")]
    names: list[str] = []
    for attempt in ("0", "1"):
        for place in places:
            place.mkdir(exist_ok=True)
            monkeypatch.chdir(place)
            run = replace(
                present_run(["train.py"], attempt, None, {}), process=f"gone:{attempt}:{place.name}"
            )
            names.append(record.begin(job.folder, run)[0])
    assert names == ["", "2", "", "2"]


def test_two_that_run_at_the_same_time_need_something_that_tells_them_apart(job: Job) -> None:
    """Both stand for this process, which is there."""

    def begin(words: str, name: str | None = None, **environ: str) -> str:
        return record.begin(job.folder, present_run(words.split(), "0", name, environ))[0]

    assert begin("train.py --seed 1") == ""
    with pytest.raises(LaunchError, match=r"runs already in this job.*--name a"):
        begin("train.py --seed 1")
    assert (begin("train.py --seed 2"), begin("train.py --seed 1", SEED="3")) == ("2", "3")
    assert begin("train.py --seed 1", name="a") == "a"
    with pytest.raises(LaunchError, match="'a' runs already"):
        begin("train.py --seed 9", name="a")


def test_a_name_finds_its_training_whatever_the_command_line_is(job: Job) -> None:
    for attempt in ("0", "1"):
        for name in ("a", "b"):
            run = present_run([f"train-{attempt}.py"], attempt, name, {})
            assert record.begin(job.folder, replace(run, process=f"gone:{attempt}:{name}"))[0] == name
    assert job.runs("other.py") == [""], "numbers and names do not meet"


def test_starts_in_the_same_moment_get_names_of_their_own(job: Job) -> None:
    names: list[str] = []

    def start(number: int) -> None:
        run = present_run([f"train.py --seed {number}"], "0", None, {})
        names.append(record.begin(job.folder, replace(run, process=f"gone:{number}"))[0])

    threads = [threading.Thread(target=start, args=(number,)) for number in range(12)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(set(names)) == 12


def test_the_record_holds_no_value_of_a_variable_and_is_private(job: Job) -> None:
    job.runs("train.py", WANDB_API_KEY=["a-secret"])
    path = job.folder / record.FILE
    assert "a-secret" not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    assert json.loads(path.read_text())[0]["words"] == ["train.py"]


@pytest.mark.parametrize("content", ["{", "[1]", '[{"attempt": 3}]', "null", '[{"words": 3}]'])
def test_a_damaged_record_mixes_no_trainings_up(job: Job, content: str) -> None:
    job.folder.mkdir(mode=0o700)
    (job.folder / record.FILE).write_text(content)
    (job.folder / record.FILE).chmod(0o600)
    with pytest.raises(LaunchError, match="damaged"):
        job.runs("train.py")
