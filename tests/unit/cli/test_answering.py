"""What ordinary users are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.cli.answering import SHOWN_OF_OTHERS, Answering
from polluxd.cli.web.overview import RestingReader
from polluxd.config.settings import PolicySettings
from polluxd.errors import PolluxError, SlurmUnavailable

ADA, BOB = 1001, 1002
PUBLIC = "PrivateData             = none\n"


@pytest.fixture
def answering(store):
    mine = replace(store.views[0], uid=ADA)
    ended = replace(mine, job_id=8, state="COMPLETED", ended_at=mine.submitted_at + 9, gpus=0)
    store.views = [
        mine,
        ended,
        replace(mine, job_id=9, uid=BOB, user="bob", slurm_reason="Priority", state="PENDING"),
    ]
    return lambda config=lambda: PUBLIC: Answering(store, PolicySettings(), config)


def test_own_jobs_are_shown_in_full_and_others_as_squeue_shows_them(answering):
    mine, theirs = answering().jobs(ADA, ended=False)
    assert (mine["job_id"], mine["goodput"], mine["progress"]) == (7, 1234.5678, 0.25)
    assert (theirs["job_id"], theirs["user"], theirs["reason"]) == (9, "bob", "Slurm: Priority")
    assert theirs.keys() == mine.keys(), "a page has the columns of both"
    assert {key for key, value in theirs.items() if value is not None} <= {*SHOWN_OF_OTHERS, "reason"}
    assert not set(SHOWN_OF_OTHERS) & {
        "goodput",
        "progress",
        "batch_size",
        "speedup",
        "epoch",
        "moves",
        "lost_s",
        "advice",
    }


def test_finished_jobs_are_shown_to_their_user_alone(answering):
    assert [row["job_id"] for row in answering().jobs(ADA, ended=True)] == [7, 9, 8]
    assert [row["job_id"] for row in answering().jobs(BOB, ended=True)] == [7, 9]
    assert [row["job_id"] for row in answering().jobs(ADA, ended=False)] == [7, 9]


def test_no_users_question_reads_ended_jobs_of_others(answering, store, monkeypatch):
    """One user may have submitted and cancelled twenty thousand of them."""
    asked, view = [], store.jobs_view

    def counted(*, ended=True, uid=None, since=0.0, most=0):
        asked.append((ended, uid, since > 0, most))
        return view(ended=ended, uid=uid)

    costs, moves = store.move_costs, []
    monkeypatch.setattr(store, "jobs_view", counted)
    monkeypatch.setattr(store, "move_costs", lambda **words: moves.append(words) or costs(**words))
    monkeypatch.setattr("polluxd.cli.answering.RestingReader", lambda: RestingReader(clock=lambda: 0.0))
    told = answering()
    for question in (told.top, told.cluster):
        question(ADA)
    for uid in (ADA, BOB):
        told.jobs(uid, ended=True)
    assert moves.count({"ended": True}) == 1, "of all jobs, and seldom"
    for ended, uid, lately, most in asked:
        assert not ended or (most and (lately or uid in (ADA, BOB))), asked


def test_names_of_others_are_cut(answering, store):
    store.views[2] = replace(store.views[2], name="x" * 1024)
    assert len(answering().jobs(ADA, ended=False)[1]["name"]) == 64
    assert len(answering().jobs(BOB, ended=False)[1]["name"]) == 1024


@pytest.mark.parametrize("said", ["PrivateData  = accounts,jobs,usage\n", "PrivateData  = all\n", "nonsense"])
def test_private_data_hides_others(answering, said):
    assert [row["job_id"] for row in answering(lambda: said).jobs(ADA, ended=False)] == [7]
    assert [row["job_id"] for row in answering(lambda: said).top(BOB)["jobs"]] == [9]


def test_others_are_hidden_while_slurm_does_not_say_whether_they_are_private(answering):
    def away() -> str:
        raise SlurmUnavailable

    assert [row["job_id"] for row in answering(away).jobs(ADA, ended=False)] == [7]


def test_the_status_for_users_names_no_job_of_others(answering):
    assert set(answering().top(ADA)["status"]) == {"cluster", "mode", "paused", "decided_at"}


@pytest.mark.parametrize(
    "question", [lambda a, uid: a.explain(uid, 7), lambda a, uid: a.history(uid, 7, since=0.0)]
)
def test_the_story_of_a_job_is_its_users_alone(answering, question):
    with pytest.raises(PolluxError, match="another user's"):
        question(answering(), BOB)
    assert question(answering(), ADA)
    assert question(answering(), 0)


def test_a_hidden_job_looks_like_an_unknown_one(answering):
    for job in (9, 123):
        with pytest.raises(
            PolluxError, match=f"^job {job} is another user's, which PrivateData .* or not known"
        ):
            answering(lambda: "PrivateData  = jobs\n").explain(ADA, job)


def test_a_job_that_nobody_knows_is_said_to_be_unknown(answering):
    with pytest.raises(PolluxError, match="not known to polluxd"):
        answering().explain(ADA, 123)


def test_the_story_for_its_user_has_no_settings_of_others(answering, store):
    told = answering().explain(ADA, 7)
    assert told["settings"] == {"paused": False}
    assert told["story"][0] == "Job 7 (resnet) of ada: running, holds 4 GPUs on n1."
    assert set(answering().explain(0, 7)["settings"]) > {"paused", "user_weights"}
