"""Logs of real clusters, and synthetic traces."""

from __future__ import annotations

import json

import numpy as np
import pytest

from polluxd.sim.applications import placement_of, split_batch
from polluxd.sim.cluster import Scenario
from polluxd.sim.cluster_logs import HELIOS, PHILLY, PHILLY_JSON, SACCT, read_log, recognise
from polluxd.sim.engine import simulate
from polluxd.sim.generator import generate
from polluxd.sim.policies import POLICIES
from polluxd.sim.recorded import replayed
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


def log_of(tmp_path, kind, text):
    path = tmp_path / "log"
    path.write_text(text)
    assert recognise(path) is kind
    return read_log(path, kind)


def replay(log, apps, *, tuned=False, cluster_gpus=16, **more):
    return replayed(log, apps, tuned=tuned, cluster_gpus=cluster_gpus, gpus_per_node=4, **more)


@pytest.mark.parametrize("tuned", [False, True])
def test_jobs_of_sacct_take_as_long_as_recorded_whatever_is_assumed(tmp_path, apps, tuned):
    log = log_of(tmp_path, SACCT, SACCT_TEXT.replace("TIMEOUT", "COMPLETED"))
    found = replay(log, apps, tuned=tuned)
    assert [(j.name, j.time, j.gpus) for j in found.jobs] == [("job-72", 0.0, 8), ("job-71", 600.0, 4)]
    assert found.recorded_gpu_hours == pytest.approx(8 * 24 + 4)
    scenario = Scenario(nodes=4, restart_seconds=0.0)
    run = simulate(found.jobs, apps, POLICIES["fifo"](scenario), scenario)
    lasted = [job.ended_at - job.started_at for job in run.jobs]
    assert lasted == pytest.approx([86400.0, 3600.0], rel=0.02)


def test_every_row_that_is_no_training_is_counted_with_its_reason(tmp_path):
    log = log_of(tmp_path, SACCT, SACCT_TEXT)
    assert [job.name for job in log.jobs] == ["job-71"]
    assert log.left_out == {
        "step of a job": 1,
        "state TIMEOUT": 1,
        "no GPU": 1,
        "state FAILED": 1,
        "state CANCELLED": 1,
    }
    assert log.has_states
    bare = log_of(tmp_path, SACCT, "JobID|Submit|Elapsed|AllocTRES\n1|2024-05-01|01:00:00|gres/gpu=1\n")
    assert not bare.has_states


def test_arrays_requeues_types_and_steps_are_told_apart(tmp_path, apps):
    ended = FULL_TEXT
    for state in ("CANCELLED by 1004", "REQUEUED", "OUT_OF_MEMORY"):
        ended = ended.replace(state, "COMPLETED")
    assert [(j.name, j.time, j.gpus) for j in replay(log_of(tmp_path, SACCT, ended), apps).jobs] == [
        ("job-9001_1", 0.0, 1),
        ("job-9002", 1800.0, 6),
        ("job-9002+1", 1800.0, 6),
        ("job-9003+0", 1860.0, 2),
    ]


def test_names_with_quotes_and_bars_cost_no_other_row(tmp_path):
    """sacct quotes nothing: a name may begin with a quote, or hold the separator."""
    row = "{}|{}|2026-10-01T00:00:00|01:00:00|gres/gpu=2|COMPLETED\n"
    names = ['"lr=1e-3', "a|b", "|", "plain", "x" * 60_000, "tab\t", "\x1b[2J"]
    text = "JobID|JobName|Submit|Elapsed|AllocTRES|State\n" + "".join(
        row.format(n, name) for n, name in enumerate(names)
    )
    assert len(log_of(tmp_path, SACCT, text).jobs) == len(names)
    without = text.replace("JobName", "WorkDir")
    log = log_of(tmp_path, SACCT, without)
    assert len(log.jobs) == len(names) - 2
    assert sum(log.left_out.values()) == 2


def test_philly_helios_and_acme_are_told_by_their_headers(tmp_path, apps):
    philly = "timestamp,duration,num_gpus\n2017-10-09 07:01:55,660,1\n2017-10-09 06:13:03,2951,2\n"
    helios = "job_id,gpu_num,submit_time,duration\n1,8,2020-04-01 10:00:00,900\n2,0,2020-04-01 10:00:00,900\n"
    acme = (
        "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time\n"
        "x,u,1,8,1,Other,COMPLETED,2023-03-01 00:18:22+08:00,,,3600,0,1\n"
        "y,u,1,8,1,Other,COMPLETED,2023-02-28 16:18:32Z,,,3600.5,0,1\n"
    )
    log = log_of(tmp_path, PHILLY, philly)
    assert [j.gpus for j in log.jobs] == [2, 1], "in order of time"
    assert len(replay(log, apps, most_jobs=1).jobs) == 1
    assert [j.gpus for j in log_of(tmp_path, HELIOS, helios).jobs] == [8]
    first, second = log_of(tmp_path, HELIOS, acme).jobs
    assert second.submitted - first.submitted == 10.0


def test_phillys_own_json_is_read_by_its_last_attempt(tmp_path):
    def job(status, *attempts):
        run = [
            {
                "start_time": a,
                "end_time": b,
                "detail": [{"ip": f"m{i}", "gpus": ["gpu0"] * n} for i, n in enumerate(at)],
            }
            for a, b, at in attempts
        ]
        return {"status": status, "submitted_time": "2017-10-07 01:00:00", "attempts": run, "jobid": "j"}

    jobs = [
        job(
            "Pass",
            ("2017-10-07 01:00:10", "2017-10-07 01:00:20", [8]),
            ("2017-10-07 02:00:00", "2017-10-07 03:00:00", [2, 2]),
        ),
        job("Killed", ("2017-10-07 01:00:10", "2017-10-07 02:00:20", [8])),
        job("Pass"),
        job("Pass", (None, None, [1])),
        7,
    ]
    log = log_of(tmp_path, PHILLY_JSON, json.dumps(jobs))
    assert [(j.gpus, j.seconds) for j in log.jobs] == [(4, 3600.0)]
    assert sum(log.left_out.values()) == 4
    (tmp_path / "log").write_text("[" * 100_000)
    with pytest.raises(TraceError, match="is no JSON"):
        read_log(tmp_path / "log", PHILLY_JSON)


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
            "JobID|Submit|Elapsed|AllocTRES\n1|2024-05-01|01:00:00|cpu=1\n",
            "no training that ran on GPUs.*1 no GPU",
        ),
        ("JobID|Submit|Elapsed|AllocTRES\n", "no row at all"),
    ],
)
def test_a_log_without_a_training_is_refused_with_the_reasons(tmp_path, text, message):
    with pytest.raises(TraceError, match=message):
        log_of(tmp_path, SACCT, text)


def test_jobs_larger_than_the_cluster_are_left_out(tmp_path, apps):
    text = "JobID|Submit|Elapsed|AllocTRES\n" + "".join(
        f"{gpus}|2024-05-01|01:00:00|gres/gpu={gpus}\n" for gpus in (99, 4)
    )
    log = log_of(tmp_path, SACCT, text)
    assert [job.gpus for job in replay(log, apps).jobs] == [4]
    with pytest.raises(TraceError, match="every training has 4 GPUs or more, and the cluster 2"):
        replay(log, apps, cluster_gpus=2)


def test_a_user_who_tunes_wastes_at_most_half(tmp_path, apps):
    """The paper's rule, against a search over every batch size and application by the applications' own times."""
    text = "JobID|Submit|Elapsed|AllocTRES\n" + "".join(
        f"{gpus}|2024-05-01|{hours:02}:00:00|gres/gpu={gpus}\n"
        for gpus in (1, 2, 8, 16)
        for hours in (1, 10, 90)
    )
    log = log_of(tmp_path, SACCT, text)
    tuned, untuned = (replay(log, apps, tuned=tuned, cluster_gpus=64) for tuned in (True, False))
    for job, assumed in zip(log.jobs, tuned.jobs, strict=True):
        app = apps[assumed.application]

        def seconds(gpus, batch, app=app):
            m, s = split_batch(batch, gpus, app.limits)
            step, sync = app.times(placement_of(gpus, 4), m)
            return app.iterations(batch, app.epochs - 1) * (step + s * (step - sync))

        alone = min(seconds(1, batch) for batch in range(app.limits.initial, app.limits.maximum + 1, 8))
        assert assumed.work * seconds(job.gpus, assumed.batch_size) == pytest.approx(job.seconds)
        assert job.gpus * job.seconds <= 2.02 * assumed.work * alone
    assert tuned.recorded_gpu_hours / tuned.least_gpu_hours < 2
    assert untuned.least_gpu_hours < tuned.least_gpu_hours


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
