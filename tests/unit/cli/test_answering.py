"""What ordinary users are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.answers.controllers import SERVER, answers_client, munge_socket
from polluxd.answers.wire import Explain, History, Jobs, Top
from polluxd.cli.answering import SHOWN_OF_OTHERS, Answering
from polluxd.errors import ConfigError, PolluxError, SlurmUnavailable
from polluxd.settings import PolicySettings

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
    mine, theirs = answering()(Jobs(), ADA)
    assert (mine["job_id"], mine["goodput"], mine["progress"]) == (7, 1234.5678, 0.25)
    assert (theirs["job_id"], theirs["user"], theirs["reason"]) == (9, "bob", "Slurm: Priority")
    assert {key for key, value in theirs.items() if value is not None} <= SHOWN_OF_OTHERS | {"reason"}
    assert not SHOWN_OF_OTHERS & {
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
    assert [row["job_id"] for row in answering()(Jobs(ended=True), ADA)] == [7, 9, 8]
    assert [row["job_id"] for row in answering()(Jobs(ended=True), BOB)] == [7, 9]
    assert [row["job_id"] for row in answering()(Jobs(ended=False), ADA)] == [7, 9]


@pytest.mark.parametrize("said", ["PrivateData  = accounts,jobs,usage\n", "PrivateData  = all\n", "nonsense"])
def test_private_data_hides_others(answering, said):
    assert [row["job_id"] for row in answering(lambda: said)(Jobs(), ADA)] == [7]
    assert [row["job_id"] for row in answering(lambda: said)(Top(), BOB)["jobs"]] == [9]


def test_others_are_hidden_while_slurm_does_not_say_whether_they_are_private(answering):
    def away() -> str:
        raise SlurmUnavailable

    assert [row["job_id"] for row in answering(away)(Jobs(), ADA)] == [7]


def test_the_status_for_users_names_no_job_of_others(answering):
    assert set(answering()(Top(), ADA)["status"]) == {"cluster", "mode", "paused", "decided_at"}


@pytest.mark.parametrize("question", [Explain(job=7), History(job=7)])
def test_the_story_of_a_job_is_its_users_alone(answering, question):
    with pytest.raises(PolluxError, match="another user's"):
        answering()(question, BOB)
    assert answering()(question, ADA)
    assert answering()(question, 0)


def test_a_hidden_job_looks_like_an_unknown_one(answering):
    for job in (9, 123):
        with pytest.raises(PolluxError, match=f"^job {job} is not known to polluxd"):
            answering(lambda: "PrivateData  = jobs\n")(Explain(job=job), ADA)


def test_a_job_that_nobody_knows_is_said_to_be_unknown(answering):
    with pytest.raises(PolluxError, match="not known to polluxd"):
        answering()(Explain(job=123), ADA)


def test_the_story_for_its_user_has_no_settings_of_others(answering, store):
    told = answering()(Explain(job=7), ADA)
    assert told["settings"] == {"paused": False}
    assert told["story"][0] == "Job 7 (resnet) of ada: running, holds 4 GPUs on n1."
    assert set(answering()(Explain(job=7), 0)["settings"]) > {"paused", "user_weights"}


CONFIG = """\
Configuration data as of 2026-11-22T12:00:00
AuthInfo                = cred_expire=60,socket=/run/m/munge.socket
SlurmUser               = slurm(64030)
SlurmctldHost[0]        = head1(10.0.0.1)
SlurmctldHost[1]        = head2
"""


@pytest.mark.parametrize(
    ("named", "servers"),
    [
        ("", [("10.0.0.1", 9851), ("head2", 9851)]),
        ("login", [("login", 9851)]),
        ("login:77", [("login", 77)]),
        ("[::1]:77", [("::1", 77)]),
    ],
)
def test_the_servers_are_the_controllers_unless_one_is_named(monkeypatch, named, servers):
    monkeypatch.setenv(SERVER, named)
    client = answers_client(CONFIG)
    assert client.servers == servers
    assert client.trusted == {64030}
    assert str(munge_socket(CONFIG)) == "/run/m/munge.socket"


@pytest.mark.parametrize("named", ["host:0", "host:99999", "a b:x:1:2", ":"])
def test_a_server_that_is_no_address_is_refused(monkeypatch, named):
    monkeypatch.setenv(SERVER, named)
    with pytest.raises(ConfigError, match="expected HOST or HOST:PORT"):
        answers_client(CONFIG)
