"""Run the workload once.

Submit each training when it is due, sample every second, and stop at the end of the workload or at its time limit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from .measure import Recording, SlurmSilentError, Track, observe, slurm
from .workload import Size, Training, Workload, batch_script

SAMPLE_S = 1.0
SILENCE_S = 30.0
"""How long Slurm may fail to answer before the run is given up [s]."""


class RunFailedError(Exception):
    """The run cannot succeed any more; the message says why.

    `job` names the job that is to blame, if there is one.
    """

    def __init__(self, message: str, job: str | None = None) -> None:
        super().__init__(message)
        self.job = job


class Run:
    """The workload on one cluster.

    `folder` takes the batch scripts, logs and results of the jobs. The jobs in `sizes` are plain jobs of that size.
    """

    def __init__(
        self,
        work: Workload,
        *,
        env: Mapping[str, str],
        root: Path,
        folder: Path,
        sizes: Mapping[str, Size] = MappingProxyType({}),
    ) -> None:
        self.work = work
        self.env = env
        self.root = root
        self.folder = folder
        self.sizes = sizes
        self.recording = Recording()
        self._waiting: list[Training] = sorted(work.trainings, key=lambda t: t.arrive_s)
        self._last_answer = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.time() - self.recording.started_at

    def log_of(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def results(self) -> dict[str, dict[str, object]]:
        """Return what each training wrote at its end, by job name.

        A training that wrote nothing, or nothing readable, is left out.
        """
        found = {}
        for job in self.work.trainings:
            path = self.folder / f"{job.name}.result.json"
            try:
                found[job.name] = json.loads(path.read_text())
            except (OSError, json.JSONDecodeError):
                continue
        return found

    def _submit(self, job: Training) -> None:
        size = self.sizes.get(job.name)
        script = self.folder / f"{job.name}.sbatch"
        script.write_text(batch_script(job, root=self.root, folder=self.folder, size=size))
        before = time.time()
        answer = slurm(["sbatch", "--parsable", str(script)], self.env)
        job_id = int(answer.split(";")[0])
        self.recording.tracks[job_id] = Track(job.name, job_id, before)

    def _sample(self) -> None:
        try:
            seen = observe(self.env)
        except SlurmSilentError as error:
            if time.monotonic() - self._last_answer > SILENCE_S:
                raise RunFailedError(f"Slurm has not answered for {SILENCE_S:g} s: {error}") from None
            return
        self._last_answer = time.monotonic()
        self.recording.note(time.time(), seen)

    def _settle(self, settled: set[int]) -> None:
        """Take Slurm's own record of a job as soon as the job has ended.

        slurmctld forgets an ended job after some minutes.
        """
        for job_id, track in self.recording.tracks.items():
            if track.ended and job_id not in settled:
                self.recording.settle(self.env, job_id)
                settled.add(job_id)
                if track.state != "COMPLETED":
                    raise RunFailedError(
                        f"{track.name} (job {job_id}) ended in state {track.state}", track.name
                    )

    def __call__(self, show: Callable[[Run], None], check: Callable[[], None]) -> Recording:
        """Run to the end.

        Args:
            show: called at each sample.
            check: called at each sample; raises when the run should be given up.

        Raises:
            RunFailedError: a job failed, the time limit passed, or Slurm fell silent.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.recording = Recording()
        self._last_answer = time.monotonic()
        settled: set[int] = set()
        tick = time.monotonic()
        while True:
            while self._waiting and self._waiting[0].arrive_s <= self.elapsed_s:
                self._submit(self._waiting.pop(0))
            self._sample()
            self._settle(settled)
            check()
            show(self)
            if not self._waiting and self.recording.all_ended:
                return self.recording
            if self.elapsed_s > self.work.limit_s:
                late = [t for t in self.recording.tracks.values() if not t.ended]
                names = ", ".join(f"{t.name} ({t.state})" for t in late) or "not all submitted"
                raise RunFailedError(
                    f"not finished after {self.work.limit_s:g} s: {names}", late[0].name if late else None
                )
            tick = max(tick + SAMPLE_S, time.monotonic())
            time.sleep(max(tick - time.monotonic(), 0.05))


def tail(path: Path, lines: int = 15) -> str:
    """Return the end of a log, or why there is none."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) or "(empty)"
    except OSError as error:
        return f"(no log: {error.strerror})"
