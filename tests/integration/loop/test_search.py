"""A search on a real Slurm: one array, and tasks that are killed and requeued."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contrib.devcluster.processes import pids_with_environment
from pollux.search.journal import journal_path
from pollux.search.study import Search
from polluxd.model import JobState

from .conftest import BIN, ROOT, Loop

TRIALS = 5


class Tuned:
    """One search of `polluxctl tune`, in the loop's folder."""

    def __init__(
        self,
        loop: Loop,
        *options: str,
        trials: int = TRIALS,
        gpus: int = 1,
        words: str = "--parallel 4 --sampler random",
    ) -> None:
        self._loop = loop
        script = loop.folder / "digits.sh"
        script.write_text(
            f"#!/bin/bash\n#SBATCH --nodes=1 --gpus-per-node={gpus} --ntasks-per-node=1 --cpus-per-task=1\n"
            f"#SBATCH --open-mode=append --output={loop.folder}/trial-%a.log\n"
            f"#POLLUX min-gpus={gpus} max-gpus={gpus}\n"
            f"export PATH={BIN}:$PATH POLLUX_CHECKPOINT_DIR={loop.folder}/checkpoints\ncd {ROOT}\n"
            "script=contrib/examples/digits_search.py\n"
            # The last task reports values that no pruner lets go on.
            f"if [ $SLURM_ARRAY_TASK_ID = {trials - 1} ]; then export PYTHONPATH=contrib/examples\n"
            f"  sed 's/trial.report(/trial.report(-1 + /' $script >{loop.folder}/worse.py\n"
            f"  script={loop.folder}/worse.py\n"
            "fi\npollux run $script $*\n"
        )
        self.run(*f"digits.sh --trials {trials} --metric accuracy --max {words} --".split(), *options)
        (array,) = self.study()["arrays"]
        self.array = int(array)

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

    def job(self, task: str) -> Any:
        """The task's own job, by Slurm."""
        array, number = map(int, task.split("_"))
        return next(j for j in self._loop.slurm.observe().jobs if j.array == (array, number))


def test_no_trial_is_lost_counted_twice_or_failed_wrongly(loop: Loop) -> None:
    search = Tuned(loop, "--epochs 6 --alpha 0.03")
    loop.submitted.append(search.array)
    loop.until(lambda: len(search.running()) >= 2, why="two trials to begin")
    killed, requeued = search.running()[:2]
    for pid in pids_with_environment(f"SLURM_JOB_ID={search.job(killed['task']).job_id}"):
        if (Path("/proc") / str(pid) / "comm").read_text() != "slurmstepd\n":  # Slurm's own
            os.kill(pid, signal.SIGKILL)
    subprocess.run(
        ["scontrol", "requeue", requeued["task"]],
        env={**os.environ, **loop.cluster.client_environment},
        check=True,
    )
    jobs = range(TRIALS)
    loop.until(
        lambda: all(search.job(f"{search.array}_{n}").state.finished for n in jobs),
        why="the end of all tasks",
    )
    ended = {n: search.job(f"{search.array}_{n}").state for n in jobs}
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
    assert {state for n, state in ended.items() if f"{search.array}_{n}" != killed["task"]} == {
        JobState.COMPLETED
    }
    best = json.loads(search.run("best", "digits"))
    assert best["value"] == max(t["value"] for t in study["trials"] if t["state"] == "complete")
    assert best["gpu_hours"] > 0


def test_a_bad_trial_goes_on_from_a_good_one_s_checkpoint(loop: Loop) -> None:
    tasks = range(4)
    search = Tuned(
        loop, "--epochs 20 --alpha 0.04 --max-batch-size 32", trials=4, gpus=2, words="--pruner pbt"
    )
    loop.submitted.append(search.array)
    loop.until(
        lambda: all(search.job(f"{search.array}_{n}").state.finished for n in tasks),
        seconds=400,
        why="the end of all tasks",
    )
    study = search.study()
    trials = {trial["number"]: trial for trial in study["trials"]}
    heirs = [trial for trial in trials.values() if trial["parent"] is not None]
    log = (loop.folder / "trial-3.log").read_text()
    assert any(trial["task"] == f"{search.array}_3" for trial in heirs), log
    for heir in heirs:
        parent = trials[heir["parent"]]
        assert heir["params"]["width"] == parent["params"]["width"], "a shape of the checkpoint"
        factor = heir["params"]["lr"] / parent["params"]["lr"]
        assert min(abs(factor - 0.8), abs(factor - 1.2)) < 1e-6 or heir["params"]["lr"] == 1.0
        if heir["state"] == "complete":
            own = (loop.folder / f"trial-{heir['task'].partition('_')[2]}.log").read_text()
            assert f"learning rate {heir['params']['lr']:.4g} " in own, "not the checkpoint's"
    assert re.search(r"restored the checkpoint in .*: epoch ([3-9]|1\d), optimizer step", log), log
    states = Counter((trial["task"], trial["state"]) for trial in trials.values())
    assert {count for (_, state), count in states.items() if state == "complete"} == {1}
    assert "failed" not in {state for _, state in states}
    assert {search.job(f"{search.array}_{n}").state for n in tasks} == {JobState.COMPLETED}
    assert search.run("status", "digits").count("4 of 4 trials have ended") == 1
