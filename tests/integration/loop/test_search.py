"""A search on a real Slurm: one array, and tasks that are killed and requeued."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from contrib.chaos.faults import KINDS, Chaos
from contrib.devcluster import DevCluster
from contrib.devcluster.processes import pids_with_environment
from contrib.devcluster.slurmconf import SiteLines
from pollux.search.journal import journal_path
from pollux.search.study import Search
from polluxd.model import JobState

from .conftest import BIN, ROOT, Loop, loop_on, polluxd
from .elastic import kill_processes

TRIALS = 5


class Tuned:
    """One search of `polluxctl tune`, in the loop's folder."""

    def __init__(
        self,
        loop: Loop,
        *options: str,
        trials: int = TRIALS,
        gpus: int = 1,
        most: int | None = None,
        attempts: int = 1,
        words: str = "--parallel 4 --sampler random",
    ) -> None:
        self._loop = loop
        script = loop.folder / "digits.sh"
        script.write_text(
            f"#!/bin/bash\n#SBATCH --nodes=1 --gpus-per-node={gpus} --ntasks-per-node=1 --cpus-per-task=1\n"
            f"#SBATCH --open-mode=append --output={loop.folder}/trial-%a.log\n"
            f"#POLLUX min-gpus={gpus} max-gpus={most or gpus}\n"
            f"export PATH={BIN}:$PATH POLLUX_CHECKPOINT_DIR={loop.folder}/checkpoints\ncd {ROOT}\n"
            "script=contrib/examples/digits_search.py\n"
            # The last task reports values that no pruner lets go on.
            f"if [ $SLURM_ARRAY_TASK_ID = {trials - 1} ]; then export PYTHONPATH=contrib/examples\n"
            f"  sed 's/trial.report(/trial.report(-1 + /' $script >{loop.folder}/worse.py\n"
            f"  script={loop.folder}/worse.py\n"
            f"fi\nfor each in $(seq {attempts}); do pollux run $script $* && exit 0; sleep 1; done; exit 1\n"
        )
        self.run(*f"digits.sh --trials {trials} --metric accuracy --max {words} --".split(), *options)
        (array,) = self.study()["arrays"]
        self.array = int(array)
        self.tasks = [f"{array}_{n}" for n in range(trials)]
        loop.submitted.append(self.array)

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [BIN / "polluxctl", "tune", *words],
            env={**os.environ, **self._loop.cluster.client_environment},
            capture_output=True,
            text=True,
            check=False,
            cwd=self._loop.folder,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def study(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads(self.run("status", "digits", "--json"))
        return found

    def running(self) -> list[Mapping[str, Any]]:
        """Return the running trials that have their values."""
        search = Search(journal_path("digits", self._loop.folder), "digits")
        live = [
            trial for trial in search.trials() if not trial.state.is_finished() and len(trial.params) == 2
        ]
        return [{"task": trial.user_attrs["task"], "params": trial.params} for trial in live]

    def over(self) -> bool:
        """Whether all tasks have ended."""
        jobs = [job for job in self._loop.slurm.observe().jobs if job.array and job.array[0] == self.array]
        return len(jobs) == len(self.tasks) and all(job.state.finished for job in jobs)

    def job(self, task: str) -> Any:
        """The task's own job, by Slurm."""
        array, number = map(int, task.split("_"))
        return next(j for j in self._loop.slurm.observe().jobs if j.array == (array, number))


def test_no_trial_is_lost_counted_twice_or_failed_wrongly(loop: Loop) -> None:
    search = Tuned(loop, "--epochs 6 --alpha 0.03")
    loop.until(lambda: len(search.running()) >= 2, why="two trials to begin")
    killed, requeued = search.running()[:2]
    assert kill_processes(loop.cluster, search.job(killed["task"]).job_id)
    loop.cluster.command("scontrol", "requeue", requeued["task"])
    loop.until(search.over, why="the end of all tasks")
    ended = {task: search.job(task).state for task in search.tasks}
    study = search.study()
    by_task = {trial["task"]: trial for trial in study["trials"]}
    assert len(study["trials"]) == len(by_task) == TRIALS, "a task has one trial, in all its attempts"
    assert by_task[requeued["task"]]["params"] == requeued["params"]
    assert search.job(requeued["task"]).restart_count >= 1
    failed = [trial for trial in study["trials"] if trial["state"] == "failed"]
    assert [(t["task"], t["why"]) for t in failed] == [(killed["task"], "its task left Slurm's queue")]
    states = {trial["state"] for trial in study["trials"] if trial not in failed}
    assert states == {"complete", "stopped"}
    assert by_task[f"{search.array}_{TRIALS - 1}"]["state"] == "stopped"
    # Who was stopped has not failed.
    assert {state for task, state in ended.items() if task != killed["task"]} == {JobState.COMPLETED}
    best = json.loads(search.run("best", "digits"))
    assert best["value"] == max(t["value"] for t in study["trials"] if t["state"] == "complete")
    assert best["gpu_hours"] > 0


RATES = {"polluxd-kill": 45.0, "postgres-crash": 90.0, "gateway-kill": 90.0, "agent-kill": 30.0}
"""Mean seconds between two faults."""


@pytest.fixture
def preempting_loop(scratch: Path, tmp_path: Path) -> Iterator[Loop]:
    """Start a cluster whose partition `pollux` preempts jobs of the other one."""
    site = SiteLines(lines=("PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE"))
    with DevCluster(
        scratch / "soak", nodes=2, lease_s=60, publish_interval_s=1.0, accounting=True, site=site
    ) as cluster:
        yield from loop_on(cluster, polluxd(cluster, tmp_path), tmp_path)


@pytest.mark.skipif(not os.environ.get("POLLUX_SOAK"), reason="minutes of it: make soak")
@pytest.mark.timeout(7200)
def test_a_search_outlives_kills_and_preemption(preempting_loop: Loop) -> None:
    loop, chance = preempting_loop, random.Random(1)
    minutes = float(os.environ.get("MINUTES", "30"))
    words = "--parallel 12 --sampler random"
    trials = round(6 * minutes)
    search = Tuned(loop, "--epochs 8 --alpha 0.1", trials=trials, most=4, attempts=9, words=words)
    rates = {name: RATES.get(name, 0.0) for name in KINDS}
    chaos = Chaos(loop.cluster, [loop.daemon], seed=1, rates=rates, say=print)
    chaos.start()
    begun = asked = time.monotonic()
    seen: dict[int, float] = {}
    longest = urgent = 0.0
    while (now := time.monotonic()) < begun + 60 * minutes or not search.over():
        assert now < begun + 60 * minutes + 1800, search.study()
        if now < begun + 60 * minutes:
            chaos.turn()
        else:
            chaos.stop()
        if now > asked and now < begun + 60 * minutes:
            asked = now + chance.expovariate(1 / 60)
            urgent += 1
            loop.cluster.command(
                *f"sbatch --partition=pollux --gres=gpu:2 --output={loop.folder}/urgent".split(),
                "--wrap=sleep 20",
            )
        jobs = [job for job in loop.slurm.observe().jobs if job.array and not job.state.finished]
        held = [job.job_id for job in jobs if job.gpus_per_node_held]
        training = training_jobs(loop.cluster)
        seen = {job_id: now if job_id in training else seen.get(job_id, now) for job_id in held}
        longest = max([longest, *(now - at for at in seen.values())])
        time.sleep(1.0)
    study = search.study()
    states = Counter(trial["state"] for trial in study["trials"])
    requeues = sum(search.job(task).restart_count for task in search.tasks)
    print(dict(chaos.counts), f"{urgent:.0f} urgent jobs, {requeues} requeues; trials: {dict(states)}")
    print(f"GPUs were held without a training for at most {longest:.0f} s")
    assert sorted(trial["task"] for trial in study["trials"]) == sorted(search.tasks), "one of each task"
    assert set(states) <= {"complete", "stopped"}
    assert longest <= 30.0


def training_jobs(cluster: DevCluster) -> set[int]:
    """Return the jobs of a cluster that have a launcher or a rank."""
    found = set()
    for pid in pids_with_environment(f"SLURM_CONF={cluster.slurm_conf}"):
        with contextlib.suppress(OSError):
            process = Path("/proc") / str(pid)
            own = re.search(rb"\0SLURM_JOB_ID=(\d+)\0", (process / "environ").read_bytes())
            if own and b"pollux.launcher" in (process / "cmdline").read_bytes():
                found.add(int(own[1]))
    return found
