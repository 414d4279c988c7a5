"""What Slurm says of jobs after an administrator has changed them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.model import JobState
from polluxd.slurm.demands import Demands
from polluxd.slurm.present_words import PresentWords
from polluxd.slurm.protocol import SlurmJob
from tests.build import slurm_job

WAITS = slurm_job(7, JobState.PENDING, demands=Demands(nodelist=frozenset({"n9"}), constraint="ib"))
TASK = slurm_job(8, JobState.PENDING, array=(5, 2), demands=Demands(array_limit=1))


def seen(job: SlurmJob, text: str, words: PresentWords | None = None) -> Demands:
    words = words or PresentWords()
    words.read(text, {5, 7})
    ((found,), unreadable) = words.applied([job])
    assert not unreadable
    return found.demands


def line(
    required: str = "n9",
    excluded: str = "",
    reservation: str = "(null)",
    features: str = "ib",
    each: str = "*:*:*",
) -> str:
    return f"7|7|N/A|{required}|{excluded}|{reservation}|{each}|{features}\n"


def test_what_nobody_changed_stays() -> None:
    assert seen(WAITS, line()) == WAITS.demands
    assert seen(WAITS, "") == WAITS.demands
    assert seen(WAITS, "7|garbled\n") == WAITS.demands
    assert seen(WAITS, line(required="n[1-")) == WAITS.demands


def test_an_administrators_words_count() -> None:
    found = seen(WAITS, line("n[1-2]", "n[3-4]", "course", "(a100|h100)&ib"))
    assert found.nodelist == {"n1", "n2"}
    assert found.exclude == {"n3", "n4"}
    assert (found.reservation, found.constraint) == ("course", "(a100|h100)&ib")
    assert seen(WAITS, line(features="(null)")).constraint == ""


def test_polluxds_own_list_is_no_administrators() -> None:
    words = PresentWords()
    words.wrote(7, ("n3", "n4"))
    assert seen(WAITS, line("n[3-4]"), words).nodelist == {"n9"}
    assert seen(WAITS, line("n5"), words).nodelist == {"n5"}
    words.wrote(7, ("n5",))  # polluxd has placed it there
    running = replace(WAITS, state=JobState.RUNNING)
    assert seen(running, line("n5"), words).nodelist == {"n5"}, (
        "and it stays bound to the administrator's nodes"
    )
    words.wrote(7, ())
    assert seen(WAITS, line(""), words).nodelist == {"n5"}
    requeued = replace(WAITS, restart_count=1)
    assert seen(requeued, line("n3")).nodelist == {"n9"}, (
        "after a restart of polluxd nobody knows who wrote it"
    )


def test_features_that_make_no_sense_leave_the_job_alone() -> None:
    words = PresentWords()
    words.read(line(features="[a|b]*2"), {7})
    ((found,), unreadable) = words.applied([WAITS])
    assert found.spec is None
    assert "Features=[a|b]*2" in unreadable["job 7"]


@pytest.mark.parametrize(("tasks", "most"), [("0-5%4", 4), ("0-5", None), ("1,3,5-9%0", None)])
def test_the_throttle_of_an_array_is_the_present_one(tasks: str, most: int | None) -> None:
    assert seen(TASK, f"5|5|{tasks}||||*:*:*|(null)\n").array_limit == most


def test_the_throttle_of_tasks_with_records_of_their_own_is_asked_for() -> None:
    words = PresentWords()
    words.read("8|5|2||||*:*:*|(null)\n", {5})
    assert words.unknown_throttles([TASK]) == [5]
    assert seen(TASK, "8|5|2||||*:*:*|(null)\n", words).array_limit == 1
    words.read_throttle(5, "JobId=5 ArrayJobId=6 ArrayTaskId=3 ArrayTaskThrottle=9 JobName=a")
    words.read_throttle(
        5, "JobId=5 ArrayJobId=5 ArrayTaskId=3 ArrayTaskThrottle=4 JobName=a ArrayTaskThrottle=7"
    )
    ((found,), _) = words.applied([TASK])
    assert found.demands.array_limit == 4
    words.read_throttle(5, "JobId=5 ArrayJobId=5 ArrayTaskId=3 JobName=ArrayTaskThrottle=7")
    ((found,), _) = words.applied([TASK])
    assert found.demands.array_limit is None


@pytest.mark.parametrize("number", ["²", "٣", "7" * 5000, "7" * 11, "", "-7", "7 "])
def test_a_line_that_is_no_job_s_stops_nothing(number: str) -> None:
    words = PresentWords()
    for text in (f"{number}|7|||||*:*:*|ib\n", f"7|{number}|||||*:*:*|ib\n"):
        assert seen(WAITS, text, words) == WAITS.demands


def test_a_job_of_one_thread_per_core_is_known() -> None:
    for each, one in (("*:*:1", True), ("*:*:*", False), ("*:*:2", False), ("2:1:1", True)):
        words = PresentWords()
        words.read(line(each=each), {7})
        ((found,), _) = words.applied([WAITS])
        assert found.spec is not None
        assert found.spec.one_thread is one


def test_the_lists_of_plain_jobs_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def names(text: str) -> tuple[str, ...]:
        looked.append(text)
        return ()

    monkeypatch.setattr("polluxd.slurm.present_words.node_names", names)
    PresentWords().read(f"9|9|N/A|{'n1,' * 9}|{'n1,' * 9}|(null)|*:*:*|(null)\n" + line(), {7})
    assert looked == ["n9", ""]
