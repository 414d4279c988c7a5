"""A search on a real Slurm: one array, and tasks that are killed and requeued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
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

    def __init__(self, loop: Loop, *options: str) -> None:
        self._loop = loop
        script = loop.folder / "digits.sh"
        script.write_text(
            "#!/bin/bash\n#SBATCH --nodes=1 --gpus-per-node=1 --ntasks-per-node=1 --cpus-per-task=1\n"
            f"#SBATCH --open-mode=append --output={loop.folder}/trial-%a.log\n#POLLUX max-gpus=1\n"
            f"export PATH={BIN}:$PATH POLLUX_CHECKPOINT_DIR={loop.folder}/checkpoints\ncd {ROOT}\n"
            "script=contrib/examples/digits_search.py\n"
            # The last task reports values that no pruner lets go on.
            f"if [ $SLURM_ARRAY_TASK_ID = {TRIALS - 1} ]; then export PYTHONPATH=contrib/examples\n"
            f"  sed 's/trial.report(/trial.report(-1 + /' $script >{loop.folder}/worse.py\n"
            f"  script={loop.folder}/worse.py\n"
            "fi\npollux run $script $*\n"
        )
        words = f"--trials {TRIALS} --parallel 4 --metric accuracy --max --sampler random".split()
        self.run("digits.sh", *words, "--", *options)
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
