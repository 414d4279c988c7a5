"""A real Slurm sends one Begin mail per job, and none per move."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster, SiteLines
from contrib.devcluster.processes import wait_until
from tests.integration.slurm_jobs import SlurmJobs

pytestmark = pytest.mark.slurm


@pytest.fixture
def mailing(scratch: Path) -> Iterator[tuple[DevCluster, Path]]:
    """A cluster whose mail program appends each subject to a file."""
    sent, program = scratch / "sent", scratch / "mail"
    sent.touch()
    program.write_text(f'#!/bin/sh\necho "$*" >>{sent}\n')
    program.chmod(0o755)
    site = SiteLines(lines=(f"MailProg={program}",))
    with DevCluster(scratch / "mailing", nodes=2, postgres=False, site=site) as cluster:
        yield cluster, sent


def test_moves_send_no_mail(mailing: tuple[DevCluster, Path], tmp_path: Path) -> None:
    cluster, sent = mailing
    jobs = SlurmJobs(cluster, tmp_path)
    mail = ("--mail-type=ALL", "--mail-user=ada")
    job_id = jobs.submit("#!/bin/sh\n#POLLUX max-gpus=4\nsleep 600\n", "--gres=gpu:1", *mail)
    jobs.start(job_id, ("n1",), 1)
    wait_until(lambda: "Began" in sent.read_text(), 60, "the mail of its begin")
    for node in ("n2", "n1"):
        jobs.requeue(job_id)
        jobs.start(job_id, (node,), 1)
    jobs.end()
    wait_until(lambda: "Ended" in sent.read_text(), 60, "the mail of its end")
    told = [line for line in sent.read_text().splitlines() if f"Job_id={job_id} " in line]
    assert [word for line in told for word in ("Began", "Requeued", "Ended") if word in line] == [
        "Began",
        "Ended",
    ]
