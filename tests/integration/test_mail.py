"""A real Slurm sends one Begin mail per job, and none per move."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster, SiteLines
from contrib.devcluster.processes import wait_until
from polluxd.model import JobState
from polluxd.slurm.protocol import Geometry
from polluxd.slurm.scontrol import ScontrolClient

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
    slurm = ScontrolClient(conf=cluster.slurm_conf)
    script = tmp_path / "job"
    script.write_text("#!/bin/sh\n#POLLUX max-gpus=4\nsleep 600\n")
    words = ("--gres=gpu:1", "--output=/dev/null", "--mail-type=ALL", "--mail-user=ada")
    job_id = int(cluster.command("sbatch", "--parsable", *words, str(script)))

    def runs_on(node: str) -> None:
        slurm.configure(job_id, Geometry((node,), 1, 1), start=True)
        wait_until(lambda: slurm.jobs([job_id])[job_id].state is JobState.RUNNING, 60, "a start")

    runs_on("n1")
    wait_until(lambda: "Began" in sent.read_text(), 60, "the mail of its begin")
    for node in ("n2", "n1"):
        slurm.requeue(job_id)
        wait_until(lambda: slurm.jobs([job_id])[job_id].state is JobState.PENDING, 60, "a requeue")
        time.sleep(1.1)  # a start in the second of the requeue fails
        runs_on(node)
    cluster.command("scancel", str(job_id))
    wait_until(lambda: "Ended" in sent.read_text(), 60, "the mail of its end")
    told = [line for line in sent.read_text().splitlines() if f"Job_id={job_id} " in line]
    assert [word for line in told for word in ("Began", "Requeued", "Ended") if word in line] == [
        "Began",
        "Ended",
    ]
