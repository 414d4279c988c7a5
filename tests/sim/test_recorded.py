"""Logs of real clusters, and synthetic traces."""

from __future__ import annotations

import numpy as np
import pytest

from polluxd.sim.cluster import Scenario
from polluxd.sim.engine import simulate
from polluxd.sim.generator import generate
from polluxd.sim.policies import POLICIES
from polluxd.sim.recorded import HELIOS, PHILLY, SACCT, read_recorded, recognise
from polluxd.sim.workload import TraceError

SACCT_TEXT = """JobID|Submit|Elapsed|AllocTRES|State
71|2024-05-01T10:00:00|01:00:00|billing=8,cpu=8,gres/gpu=4,node=1|COMPLETED
71.batch|2024-05-01T10:00:00|01:00:00|cpu=8,gres/gpu=4|COMPLETED
72|2024-05-01T09:50:00|1-00:00:00|cpu=8,gres/gpu:a100=8,gres/gpu=8,node=2|TIMEOUT
73|2024-05-01T10:05:00|02:00:00|cpu=8,node=1|COMPLETED
74|2024-05-01T10:06:00|00:00:05|cpu=8,gres/gpu=1,node=1|FAILED
75|Unknown-no-GPUs|00:00:00||CANCELLED
"""
FULL_TEXT = """JobID|JobName|User|Account|Partition|Submit|Start|End|Elapsed|AllocTRES|State|ExitCode
9001_[3-7]|sweep|ann|lab|gpu|2024-05-02T08:00:00|Unknown|Unknown|00:00:00||PENDING|0:0
9001_1|sweep|ann|lab|gpu|2024-05-02T08:00:00|2024-05-02T08:00:09|2024-05-02T09:00:09|01:00:00|billing=4,cpu=4,gres/gpu:v100=1,gres/gpu=1,mem=32G,node=1|COMPLETED|0:0
9001_1.batch|batch||lab||2024-05-02T08:00:09|2024-05-02T08:00:09|2024-05-02T09:00:09|01:00:00|cpu=4,gres/gpu:v100=1,gres/gpu=1,mem=32G,node=1|COMPLETED|0:0
9001_1.extern|extern||lab||2024-05-02T08:00:09|2024-05-02T08:00:09|2024-05-02T09:00:09|01:00:00|billing=4,cpu=4,gres/gpu=1,node=1|COMPLETED|0:0
9002|train|bob|lab|gpu|2024-05-02T08:30:00|2024-05-02T08:40:00|2024-05-03T10:40:00|1-02:00:00|billing=8,cpu=8,gres/gpu:a100=4,gres/gpu:v100=2,mem=1T,node=2|CANCELLED by 1004|0:15
9002|train|bob|lab|gpu|2024-05-02T08:30:00|2024-05-03T11:00:00|2024-05-03T12:00:00|01:00:00|billing=8,cpu=8,gres/gpu=6,node=2|REQUEUED|0:0
9003+0|het|bob|lab|gpu|2024-05-02T08:31:00|2024-05-02T08:40:00|2024-05-02T08:50:00|00:10:00|cpu=8,gres/gpu=2,node=1|OUT_OF_MEMORY|0:125
"""  # noqa: E501 - as sacct prints it


def read(tmp_path, kind, text, apps, **more):
    path = tmp_path / "log"
    path.write_text(text)
    return read_recorded(path, kind, apps, **{"cluster_gpus": 16, "gpus_per_node": 4, **more})


def test_sacct_output_becomes_jobs_that_take_as_long_as_recorded(tmp_path, apps):
    jobs = read(tmp_path, SACCT, SACCT_TEXT, apps)
    assert [(j.name, j.time, j.gpus) for j in jobs] == [("job-72", 0.0, 8), ("job-71", 600.0, 4)]
    scenario = Scenario(nodes=4, restart_seconds=0.0)
    run = simulate(jobs, apps, POLICIES["fifo"](scenario), scenario)
    lasted = [job.ended_at - job.started_at for job in run.jobs]
    assert lasted == pytest.approx([86400.0, 3600.0], rel=0.02)


def test_arrays_requeues_types_and_steps_are_told_apart(tmp_path, apps):
    jobs = read(tmp_path, SACCT, FULL_TEXT, apps)
    assert [(j.name, j.time, j.gpus) for j in jobs] == [
        ("job-9001_1", 0.0, 1),
        ("job-9002", 1800.0, 6),
        ("job-9002+1", 1800.0, 6),
        ("job-9003+0", 1860.0, 2),
    ]


def test_philly_and_helios_are_told_by_their_headers(tmp_path, apps):
    philly = "timestamp,duration,num_gpus\n2017-10-09 07:01:55,660,1\n2017-10-09 06:13:03,2951,2\n"
    helios = "job_id,gpu_num,submit_time,duration\n1,8,2020-04-01 10:00:00,900\n2,0,2020-04-01 10:00:00,900\n"
    assert [j.gpus for j in read(tmp_path, PHILLY, philly, apps)] == [2, 1], "in order of time"
    assert recognise(tmp_path / "log") is PHILLY
    assert [j.gpus for j in read(tmp_path, HELIOS, helios, apps)] == [8]
    assert recognise(tmp_path / "log") is HELIOS
    assert len(read(tmp_path, PHILLY, philly, apps, most_jobs=1)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("JobID|Submit|Elapsed\n", "line 1: no column AllocTRES"),
        ("JobID|Submit|Elapsed|AllocTRES\n1|2024-05-01T10:00:00|1h|gres/gpu=1\n", "line 2: Elapsed is '1h'"),
        (
            "JobID|Submit|Elapsed|AllocTRES\n1|yesterday|01:00:00|gres/gpu=1\n",
            "line 2: Submit is 'yesterday'",
        ),
        (
            "JobID|Submit|Elapsed|AllocTRES\n1|2024-05-01|01:00:00|gres/gpu=99\n",
            "line 2: 99 GPUs, and the cluster",
        ),
        ("JobID|Submit|Elapsed|AllocTRES\n1|2024-05-01|01:00:00|cpu=1\n", "no job that ran on GPUs"),
    ],
)
def test_bad_logs_are_named_by_file_line_and_remedy(tmp_path, apps, text, message):
    with pytest.raises(TraceError, match=message):
        read(tmp_path, SACCT, text, apps)


def test_generated_traces_follow_the_day_and_the_seed(apps):
    jobs = generate(apps, 2000, 24.0, cluster_gpus=64, seed=1)
    assert jobs == generate(apps, 2000, 24.0, cluster_gpus=64, seed=1)
    assert jobs != generate(apps, 2000, 24.0, cluster_gpus=64, seed=2)
    hours = (8 + np.array([j.time for j in jobs]) / 3600) % 24
    day, night = ((hours > 10) & (hours < 18)).sum(), ((hours > 22) | (hours < 6)).sum()
    assert day > 2 * night
    assert 20 < jobs[-1].time / 3600 < 28
    assert np.mean([j.gpus == 1 for j in jobs]) == pytest.approx(0.5, abs=0.03)


def test_sweeps_arrive_at_one_moment(apps):
    jobs = generate(apps, 400, 24.0, cluster_gpus=64, seed=1, sweep=20)
    assert len(jobs) == 400
    _, sizes = np.unique([j.time for j in jobs], return_counts=True)
    assert np.mean(sizes == 20) == pytest.approx(0.1, abs=0.05)
    assert max(sizes) == 20
