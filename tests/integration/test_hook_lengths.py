"""Long texts of users on a real Slurm.

The hook refuses most of them, and squeue prints little of the others.
"""

from __future__ import annotations

import pytest

from polluxd.slurm.queue import jobs_query
from tests.integration.slurm_jobs import SlurmJobs

pytestmark = pytest.mark.slurm

MOST_OF_A_RECORD = 2000
"""Bytes; a usual record has some hundred."""


def script(head: str) -> str:
    return f"#!/bin/sh\n#SBATCH --hold\n{head}\nsleep 600\n"


def test_a_comment_of_3_5_mb_is_refused_before_it_is_read(jobs: SlurmJobs) -> None:
    done = jobs.sbatch(script(f"#SBATCH --comment={'=' * 3_500_000}"), user="nobody")
    assert "comment has 3500000 bytes, at most 1024 are allowed: shorten it" in done.stderr


def test_directives_of_the_environment_have_a_bound(jobs: SlurmJobs) -> None:
    done = jobs.sbatch(script(""), user="nobody", SBATCH_POLLUX="min-gpus=1 " + "#" * 100_000)
    assert "SBATCH_POLLUX has 100011 bytes, at most 1024 are allowed: shorten it" in done.stderr


def test_an_update_makes_no_record_longer(jobs: SlurmJobs) -> None:
    # Of squeue's fields only AdminComment and Dependency may be longer than Slurm's own bound.
    job = jobs.submit(script(""), "--ntasks=1", "--gres=gpu:1", user="nobody")
    long = "n" * 5000
    requests = ",".join(["gres:gpu:1"] * 500)
    updates = (
        *(f"TresPerNode={requests}", f"TresPerJob={requests}", f"Licenses={','.join(['matlab:1'] * 500)}"),
        *(f"Partition={','.join(['pollux'] * 500)}", f"Account={long}", f"QOS={long}", f"JobName={long}"),
    )
    for update in updates:
        refused = jobs.run("scontrol", "update", f"JobId={job}", update, user="nobody")
        assert refused.returncode != 0, update[:40]
    record = jobs.run("squeue", "--noheader", f"--jobs={job}", SQUEUE_FORMAT2=jobs_query().format).stdout
    assert len(record) < MOST_OF_A_RECORD


def test_lists_of_dependencies_are_not_printed_and_still_known(jobs: SlurmJobs) -> None:
    first = jobs.submit(script(""), "--ntasks=1", "--array=0-49", user="nobody")
    waits = "--dependency=afterok:" + ":".join(f"{first}_{task}" for task in range(50))
    second = jobs.submit(script(""), "--ntasks=1", "--array=0-49", waits, user="nobody")
    query = jobs_query()
    words = ("squeue", "--all", "--noheader", "--array", f"--jobs={first},{second}")
    answer = jobs.run(*words, SQUEUE_FORMAT2=query.format).stdout
    whole = jobs.run(*words, SQUEUE_FORMAT2=query.format.replace("Dependency:1<", "Dependency:<")).stdout
    assert answer.count(query.end) == whole.count(query.end) == 100
    assert len(answer) < MOST_OF_A_RECORD * 100
    assert len(whole) > len(answer) + 50 * 50 * len("afterok:1_1")
    found = jobs.client.observe().jobs
    dependent = {job.array[0]: job.dependent for job in found if job.array is not None}
    assert dependent[first] is False
    assert dependent[second] is True
