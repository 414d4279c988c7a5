"""`polluxctl report` on a real slurmdbd, against a count second by second of what its database holds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contrib.devcluster import DevCluster
from contrib.devcluster.processes import wait_until
from contrib.devcluster.slurmconf import SiteLines
from polluxd.model import JobState
from polluxd.slurm.notation import node_names
from tests.integration.slurm_jobs import SlurmJobs

pytestmark = pytest.mark.slurm

POLLUXCTL = Path(sys.executable).with_name("polluxctl")
TASKS = int(os.environ.get("POLLUX_REPORT_TASKS", "120"))
"""Of the array that most jobs belong to."""
NAME = "a|b<script>alert(1)</script>|"
# Slurm's own numbers of states and of node states (slurm.h).
_COMPLETED, _RUNNING, _BASE = 3, 1, 0xFF


@pytest.fixture(scope="module")
def accounted(scratch: Path) -> Iterator[DevCluster]:
    site = SiteLines(partitions={"second": "Nodes=n3 MaxTime=UNLIMITED State=UP"})
    with DevCluster(
        *(scratch / "report",),
        nodes=3,
        gpus_per_node=4,
        lease_s=60,
        postgres=False,
        accounting=True,
        site=site,
    ) as cluster:
        yield cluster


def report(cluster: DevCluster, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [POLLUXCTL, "report", *words],
        env=cluster.client_environment,
        capture_output=True,
        text=True,
        check=False,
    )


def rows(cluster: DevCluster, statement: str) -> list[list[str]]:
    """Ask slurmdbd's MariaDB itself."""
    socket = cluster.directory / "accounting" / "socket"
    words = [
        "mariadb",
        "--no-defaults",
        f"--socket={socket}",
        "--user=root",
        "-NB",
        "slurm_acct_db",
        "-e",
        statement,
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [line.split("\t") for line in done.stdout.splitlines()]


def by_second(cluster: DevCluster, since: int, until: int) -> Counter[str]:
    """Count GPU seconds of each second, of each job and node, from the tables."""
    name = cluster.cluster_name
    ((gpu,),) = rows(cluster, "SELECT id FROM tres_table WHERE type = 'gres' AND name = 'gpu'")
    jobs = []
    for start, end, state, nodes, tres in rows(
        cluster,
        f"SELECT time_start, time_end, state, nodelist, tres_alloc FROM {name}_job_table WHERE time_start > 0",
    ):
        held = re.search(rf"(?:^|,){gpu}=(\d+)", tres)
        if held:
            jobs.append((int(start), int(end) or until, int(state) & _BASE, node_names(nodes), int(held[1])))
    events = [
        (node, int(begin), int(end) or until)
        for node, begin, end in rows(
            cluster, f"SELECT node_name, time_start, time_end FROM {name}_event_table WHERE node_name != ''"
        )
    ]
    found: Counter[str] = Counter()
    for second in range(since, until):
        free = {f"n{n}": 4 for n in (1, 2, 3)}
        for start, end, state, nodes, gpus in jobs:
            if start <= second < end:
                found["finished" if state == _COMPLETED else "running" if state == _RUNNING else "lost"] += (
                    gpus
                )
                for node in nodes:
                    free[node] -= gpus // len(nodes)
        for node, left in free.items():
            down = any(name == node and begin <= second < end for name, begin, end in events)
            found["down" if down else "idle"] += left
    return found


def test_the_report_equals_a_count_of_slurmdbds_own_records(accounted: DevCluster, tmp_path: Path) -> None:
    jobs = SlurmJobs(accounted, tmp_path)

    def submit(what: str, *options: str) -> int:
        return jobs.submit(f"#!/bin/sh\n{what}\n", *options)

    accounted.command("scontrol", "update", "nodename=n2", "state=drain", "reason=fan")
    array = submit(
        "exit $((SLURM_ARRAY_TASK_ID % 5 == 4))",
        f"--array=0-{TASKS - 1}",
        "--gres=gpu:1",
        f"--job-name={NAME}",
    )
    time.sleep(3)
    accounted.command("scontrol", "update", "nodename=n2", "state=resume")
    for size in (1, 2, 4):
        submit("sleep 3", f"--gres=gpu:{size}", "--partition=second", "--job-name=train-1")
        submit("sleep 2", f"--gres=gpu:{size}", "--nodes=2", "--job-name=two")
    gone, requeued = submit("sleep 600", "--gres=gpu:1"), submit("sleep 600", "--gres=gpu:2", "--requeue")
    held = submit("sleep 1", "--hold", "--gres=gpu:4", "--array=0-3")
    late = submit("sleep 1", "--gres=gpu:4", "--begin=now+1hour")
    for job in (gone, requeued):
        jobs.wait(job, JobState.RUNNING)
    time.sleep(3)
    accounted.command("scancel", str(gone))
    accounted.command("scontrol", "requeue", str(requeued))
    accounted.command("scancel", str(late))
    submit("true", "--gres=gpu:1", "--job-name=\u202etwo | lines")
    accounted.command("scontrol", "update", "nodename=n1", "state=down", "reason=dead")
    time.sleep(4)
    if "down" in accounted.command("sinfo", "-h", "-n", "n1", "-o", "%t"):  # or slurmd has registered again
        accounted.command("scontrol", "update", "nodename=n1", "state=resume")

    def quiet() -> bool:
        shown = accounted.command("squeue", "-h", "-o", "%i %t").splitlines()
        left = {line.split()[0].split("_")[0] for line in shown}
        return left <= {str(held), str(requeued)}

    wait_until(quiet, 400, f"array {array} and all others to end")
    accounted.command("scancel", str(requeued))
    wait_until(
        lambda: "CANCELLED" in accounted.command("sacct", "-nXP", "-oState", f"-j{requeued}"),
        60,
        "the last record",
    )
    until = int(time.time())
    since = until - 600  # the cluster was up for less: the seconds before are idle
    first, last = (time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at)) for at in (since, until))
    page, out = tmp_path / "report.html", tmp_path / "report.json"
    done = report(accounted, "--since", first, "--until", last, "--json", str(out), "--html", str(page))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    expected = by_second(accounted, since, until)
    hours = {row["cause"]: row["gpu_hours"] * 3600 for row in found["causes"]}
    idle = sum(hours[cause] for cause in ("fits", "fragments", "walls", "few", "no_demand"))
    whole = 12 * (until - since)
    assert sum(expected.values()) == whole
    told = {"finished": hours["finished"], "lost": hours["lost"], "running": hours["running"], "idle": idle}
    told["down"] = hours["down"]
    for cause, seconds in told.items():
        assert seconds == pytest.approx(expected[cause], abs=whole / 1000), (cause, told, expected)
    assert expected["lost"] > 0 < expected["down"]
    assert sum(hours.values()) == pytest.approx(whole, rel=1e-6)
    # sacct leaves out what was never eligible: the held jobs, and those with a begin that had not come.
    eligible = (
        f"SELECT COUNT(*) FROM {accounted.cluster_name}_job_table WHERE time_eligible BETWEEN 1 AND {until}"
    )
    assert [[str(found["records"] + sum(found["left_out"].values()))]] == rows(accounted, eligible)
    assert found["records"] > TASKS
    assert {reason for reason in found["left_out"] if reason.startswith("broken")} <= {
        "broken: not as many fields as columns"
    }
    assert "<script>" not in page.read_text()
    explain = [POLLUXCTL, "explain", str(gone)]
    told_of = subprocess.run(
        explain, env=accounted.client_environment, capture_output=True, text=True, check=True
    )
    assert re.search(
        rf"Job {gone}, a plain Slurm job, ended at .*: CANCELLED by 0, exit status 0", told_of.stdout
    )
    # A file of the same commands tells the same.
    commands = report(accounted, "--commands", "--since", first, "--until", last).stdout
    subprocess.run(["sh", "-ec", commands], env=accounted.client_environment, cwd=tmp_path, check=True)
    words = [
        f"--{name}={tmp_path}/{file}.txt"
        for name, file in (("sacct", "sacct"), ("nodes", "nodes"), ("closed", "events"))
    ]
    again = report(
        accounted, "--since", first, "--until", last, *words, "--json", str(tmp_path / "again.json")
    )
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "again.json").read_text())["causes"] == found["causes"]


def test_without_slurmdbd_it_says_what_to_run_elsewhere(dev_cluster: DevCluster) -> None:
    done = report(dev_cluster)
    assert done.returncode == 2
    assert "polluxctl report --commands" in done.stderr
