"""`polluxctl explain` of plain jobs: the facts, as sentences and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from polluxd.cli import access, plain_jobs
from polluxd.errors import SlurmRefused
from polluxd.model import JobState, Placement
from tests.build import slurm_job

AT = 1_700_000_000


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Slurm with `known` jobs, whose commands answer by `answers`; a command without an answer is refused."""
    made = SimpleNamespace(known={}, answers={})

    def ask(*words: str) -> str:
        for key, answer in made.answers.items():
            if set(key.split()) <= set(words):
                return str(answer)
        raise SlurmRefused(f"{words[0]}: Invalid job id specified")

    made.jobs = lambda ids: {n: made.known[n] for n in ids if n in made.known}
    made.ask = ask
    monkeypatch.setattr(plain_jobs, "ScontrolClient", lambda: made)
    monkeypatch.setattr(access, "Commands", lambda: made)
    return made


def pending(reason: str, **more: Any) -> Mapping[int, Any]:
    return {5: slurm_job(5, JobState.PENDING, spec=None, reason=reason, **more)}


@pytest.mark.parametrize(
    ("reason", "what", "action"),
    [
        ("AssocGrpGRES", "a limit of its account", "ask an administrator"),
        ("QOSMaxGRESPerUser", "a limit of its account", "ask an administrator"),
        ("JobArrayTaskLimit", "it waits by its own options", "array limit"),
        ("ReqNodeNotAvail, UnavailableNodes:n2", "nodes that it asks for", "sinfo -R"),
        ("None", "Slurm has not considered it yet", ""),
        ("SomethingNew", "Slurm keeps it waiting", ""),
    ],
)
def test_a_wait_has_a_class_and_what_would_help(slurm, polluxctl, reason, what, action):
    slurm.known, slurm.answers = pending(reason), {"squeue --start": "N/A\n"}
    facts = json.loads(polluxctl("explain", "5", "--json").out)
    assert facts["class"].startswith(what)
    assert action in facts["action"]
    assert (facts["reason"], facts["jobs_before"], facts["expected_start"]) == (reason, None, None)
    assert " ".join(facts["said"]) == polluxctl("explain", "5").out.strip()


def test_those_before_it_and_the_expected_start_are_told(slurm, polluxctl):
    slurm.known = pending("Priority", priority=100)
    queue = "\n".join(["150 Priority", "120 Resources", "130 JobHeldUser", "100 Priority", "50 Priority"])
    slurm.answers = {"squeue --start": f"{AT}\n", "squeue --states=PENDING": queue}
    facts = json.loads(polluxctl("explain", "5", "--json").out)
    assert (facts["jobs_before"], facts["expected_start"]) == (2, AT)
    assert "2 waiting jobs of partition main that you may see have a higher priority." in facts["said"]


@pytest.mark.parametrize(
    ("record", "exit_status", "signal", "said"),
    [
        ("TIMEOUT|0:0|", 0, 0, "submit it again with more --time"),
        ("OUT_OF_MEMORY|0:125|", 0, 125, "more --mem"),
        ("CANCELLED by 1000|0:15|", 0, 15, "CANCELLED by 1000, signal 15"),
        ("FAILED|3:0|", 3, 0, "exit status 3"),
        ("NODE_FAIL|1:0|", 1, 0, "--requeue"),
        ("FAILED||", 0, 0, "exit status 0"),
    ],
)
def test_an_end_has_its_cause_and_what_to_do(slurm, polluxctl, record, exit_status, signal, said):
    slurm.answers = {"sacct --jobs=5": f"{record}{AT}|\n"}
    facts = json.loads(polluxctl("explain", "5", "--json").out)
    assert (facts["exit_status"], facts["signal"], facts["ended_at"]) == (exit_status, signal, AT)
    assert said in " ".join(facts["said"])
    assert facts["output"] is None
    slurm.answers["scontrol show job 5"] = "JobId=5 StdErr=/a b/err StdOut=/a b/out.5 Power=\n"
    assert "Its output is in /a b/out.5." in polluxctl("explain", "5").out


def test_a_running_job_has_its_gpus(slurm, polluxctl):
    slurm.known = {
        5: slurm_job(5, at=Placement(("n1", "n2"), 4), spec=None, nodes=("n1", "n2"), start_time=float(AT))
    }
    facts = json.loads(polluxctl("explain", "5", "--json").out)
    assert (facts["state"], facts["gpus"], facts["nodes"], facts["started_at"]) == (
        "RUNNING",
        8,
        ["n1", "n2"],
        AT,
    )


def test_a_task_that_slurmctld_has_forgotten_is_found_in_accounting(slurm, polluxctl):
    slurm.answers = {"sacct --jobs=3_1": "5|3_1\n", "sacct --jobs=5": f"FAILED|1:0|{AT}|\n"}
    assert json.loads(polluxctl("explain", "3_1", "--json").out)["job_id"] == 5
    slurm.answers = {"sacct --jobs=3_1": "3|3_[0-4]\n"}
    assert "neither squeue nor sacct shows a job 3_1" in polluxctl("explain", "3_1").err
    slurm.answers = {}
    assert "sacct does not answer" in polluxctl("explain", "3_1").err


def test_a_pollux_job_and_an_unknown_one_are_left_to_polluxd(slurm):
    slurm.known = {5: slurm_job(5)}
    assert plain_jobs.told(5) == {}
    slurm.known = {}
    for record in (f"COMPLETED|0:0|{AT}|pollux:1 x", "", "RUNNING|0:0|Unknown|"):  # the last: squeue hides it
        slurm.answers = {"sacct --jobs=5": record}
        assert plain_jobs.told(5) == {}
