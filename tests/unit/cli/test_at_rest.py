"""Jobs whose GPUs do nothing: what Prometheus says beside what Slurm says, and mails to the owners."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from polluxd.cli.report import at_rest
from polluxd.cli.report.at_rest import mail
from polluxd.config.settings import MetricsSettings
from polluxd.errors import PolluxError
from polluxd.model import JobState, Placement
from tests.build import config, slurm_job

HOSTILE = "a\x1b[2J\nSubject: x"


@pytest.fixture
def prometheus() -> Iterator[SimpleNamespace]:
    """Serve `answer`, and note the queries."""
    told = SimpleNamespace(answer=b"", asked=[], url="")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told.asked.append(parse_qs(urlsplit(self.path).query)["query"][0])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(told.answer)

        def log_message(self, *_words: Any) -> None:
            """Stay silent."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    told.url = f"http://127.0.0.1:{server.server_port}"
    yield told
    server.shutdown()
    thread.join()
    server.server_close()


def answer(*series: tuple[dict[str, str], str]) -> bytes:
    return json.dumps({"data": {"result": [{"metric": m, "value": [1, v]} for m, v in series]}}).encode()


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Slurm with two running plain jobs and one that waits."""
    at = Placement(("n1",), 4)
    jobs = {
        n: slurm_job(n, state, held, spec=None, name=HOSTILE, user="ada")
        for n, state, held in (
            (11, JobState.RUNNING, at),
            (12, JobState.RUNNING, at),
            (13, JobState.PENDING, Placement()),
        )
    }
    made = SimpleNamespace(
        jobs=lambda ids: {n: job for n, job in jobs.items() if n in ids},
        ask=lambda *_words: made.config,
        config="MailProg                = /bin/mail\n",
    )
    monkeypatch.setattr(at_rest, "ScontrolClient", lambda: made)
    return made


def idle(url: str) -> list[dict[str, Any]]:
    return at_rest.idle_jobs(MetricsSettings(prometheus=url))


def test_running_jobs_whose_gpus_do_nothing_are_named(prometheus, slurm):
    prometheus.answer = answer(
        *(
            ({"hpc_job": job}, gpus)
            for job, gpus in (("11", "2"), ("12", "9"), ("13", "4"), ("99", "1"), ("x", "1"), ("12a", "1"))
        )
    )
    found = idle(prometheus.url)
    assert [(row["job_id"], row["idle"], row["gpus"]) for row in found] == [(12, 4, 4), (11, 2, 4)]
    assert prometheus.asked == [MetricsSettings().idle_query]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"<html>", "does not tell which GPUs do nothing"),
        (b'{"data": 3}', "expected an answer with one label"),
        (answer(({"hpc_job": "11"}, "nothing")), "does not tell"),
        (answer(({}, "1")), "does not tell"),
        (answer(({"hpc_job": "11"}, "NaN")), "does not tell"),
        (b'{"data": {"result": [{"metric": {"hpc_job": 5}, "value": [1, "1"]}]}}', "expected an answer"),
    ],
)
def test_an_answer_that_makes_no_sense_is_an_error(prometheus, slurm, said, error):
    prometheus.answer = said
    with pytest.raises(PolluxError, match=error):
        idle(prometheus.url)


def test_without_prometheus_nobody_is_asked(slurm):
    assert idle("") == []
    with pytest.raises(PolluxError, match="does not tell which GPUs do nothing"):
        idle("http://127.0.0.1:1")


def test_status_shows_them_and_mails_their_owners_when_asked(
    prometheus, slurm, store, polluxctl, monkeypatch, tmp_path
):
    prometheus.answer = answer(({"hpc_job": "11"}, "2"))
    monkeypatch.setattr(
        "polluxd.cli.access.configuration", lambda _config: config(metrics={"prometheus": prometheus.url})
    )
    program, sent = tmp_path / "mail", tmp_path / "sent"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >>{sent}\ncat >>{sent}\n')
    program.chmod(0o755)
    slurm.config = f"MailProg = {program}\n"
    before = polluxctl("status")
    assert "2 GPUs of 1 job do nothing: 11 (a" in before.out
    assert "ada: 2 of 4 GPUs" in before.out
    assert "\x1b" not in before.out
    assert not sent.exists()
    after = polluxctl("status", "--mail-owners")
    assert (after.status, "no mail" in after.out) == (before.status, False)
    option, subject, to, body = sent.read_text().splitlines()
    assert (option, subject, to) == ("-s", "Slurm job 11: 2 of 4 GPUs do nothing", "ada")
    assert "scancel 11" in body
    assert "\x1b" not in body
    assert json.loads(polluxctl("status", "--json").out)["idle"][0]["idle"] == 2


def test_a_prometheus_that_is_gone_costs_the_line_alone(slurm, store, polluxctl, monkeypatch):
    before = polluxctl("status")
    assert "GPUs at rest     not known (metrics.prometheus)" in before.out
    monkeypatch.setattr(
        "polluxd.cli.access.configuration",
        lambda _config: config(metrics={"prometheus": "http://127.0.0.1:1"}),
    )
    said = polluxctl("status")
    assert said.status == before.status
    assert "does not tell which GPUs do nothing" in said.out


def test_a_mail_that_cannot_be_sent_is_told(slurm):
    row = {"job_id": 11, "name": "x", "user": "ada", "gpus": 4, "idle": 2}
    slurm.config = "MailProg = /nowhere/mail\n"
    assert "no mail about job 11" in mail([row])[0]
    slurm.config = "MailProg = (null)\n"
    with pytest.raises(PolluxError, match="names no MailProg"):
        mail([row])
