"""The runs of the demo: under polluxd, under plain Slurm, and mixed.

`demo` makes the run under polluxd alone; `comparison` makes all.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread

from rich.console import Console

from contrib.devcluster import DevCluster

from .gain import gain, measured
from .live import LiveView
from .measure import Recording
from .pollux_side import Database, Polluxd
from .run import Run, RunFailedError
from .summary import Series, Summary, job_table, move_table
from .workload import Size, Workload

LAST_REPORT_S = 3.0
"""Time for the agents' last reports and polluxd's last writes after the last job has ended [s]."""
PICTURE_S = 10.0
"""When the live page is pictured, after the last submission: agents have reported by then [s]."""


@dataclass(slots=True)
class Stage:
    """Where a run happens and where its results go."""

    console: Console
    work: Workload
    root: Path
    scratch: Path
    out: Path
    polluxd_log: Path | None = None
    folders: list[Path] = field(default_factory=list)

    def folder(self, name: str) -> Path:
        path = self.scratch / name
        path.mkdir()
        path.chmod(0o755)
        self.folders.append(path)
        return path

    def suspects(self, job: str | None) -> list[Path]:
        """Return the logs to look at after a failure, the likeliest first."""
        of_job = [folder / f"{job}.log" for folder in reversed(self.folders)] if job else []
        return [*of_job[:1], *([self.polluxd_log] if self.polluxd_log else [])]

    def keep_logs(self) -> None:
        """Copy all logs to `out/logs`, because the scratch folder is removed."""
        target = self.out / "logs"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for folder in self.folders:
            for path in (*folder.glob("*.log"), *folder.glob("*.sbatch"), *folder.glob("*.result.json")):
                shutil.copy(path, target / f"{folder.name}-{path.name}")
        for path in (*self.scratch.glob("cluster/log/*.log"), *self.scratch.glob("cluster/postgres/*.log")):
            shutil.copy(path, target / path.name)


def _accuracies(results: Mapping[str, Mapping[str, object]]) -> dict[str, float]:
    return {
        n: float(r["accuracy"]) for n, r in results.items() if isinstance(r.get("accuracy"), (int, float))
    }  # type: ignore[arg-type]


def under_pollux(
    stage: Stage, cluster: DevCluster, plain: Mapping[str, Size] | None = None, *, name: str = "pollux"
) -> Summary:
    """Run the workload under polluxd.

    Args:
        plain: the jobs that are plain jobs of these sizes; polluxctl then reports on none.
        name: of the run's folder.
    """
    plain = plain or {}
    folder = stage.folder(name)
    # Plain jobs may take longer than the limit: only a stuck job should stop such a run.
    work = replace(stage.work, limit_s=3 * stage.work.limit_s) if plain else stage.work
    daemon, database = Polluxd(cluster, folder), Database(cluster)
    stage.polluxd_log = daemon.log
    run = Run(work, env=cluster.client_environment, root=stage.root, folder=folder, sizes=plain)
    title = "Pollux jobs and plain jobs" if plain else "Pollux on Slurm"
    try:
        daemon.start()
        with daemon.live_page() as url:
            stage.console.print(f"Live page, for one browser: {url}", soft_wrap=True, highlight=False)
            with LiveView(stage.console, title, work.gpus, database.details, database.reasons) as show:
                picture = Thread(
                    target=daemon.picture_page,
                    args=(stage.out / f"live-page{'-mixed' if plain else ''}.png",),
                )
                recording = run(_also_pictured(show, picture), daemon.must_run)
            if picture.is_alive():
                picture.join()
        time.sleep(LAST_REPORT_S)
        if idle := database.idle_notes(recording.started_at):
            raise RunFailedError(f"polluxd left GPUs idle beside a waiting job: {idle[-1]}")
        names = {t.job_id: t.name for t in recording.tracks.values()}
        if not plain:
            daemon.write_moves(stage.out)
        summary = Summary(
            recording,
            work.gpus,
            _accuracies(run.results()),
            database.batch_sizes() | _plain_batches(recording, plain),
            [move for move in database.moves() if move.job_id in names],
            database.noise_scales(names),
            database.lost_gpu_s(),
        )
    finally:
        database.close()
        daemon.stop()
    return summary


def _also_pictured(show: Callable[[Run], None], picture: Thread) -> Callable[[Run], None]:
    """Return `show`, which also takes the picture some seconds after the last submission."""

    def shown(run: Run) -> None:
        show(run)
        last = max((t.submitted_at for t in run.recording.tracks.values()), default=time.time())
        whole = len(run.recording.tracks) == len(run.work.trainings)
        if picture.ident is None and whole and time.time() - last > PICTURE_S:
            picture.start()

    return shown


def under_plain_slurm(stage: Stage, cluster: DevCluster, sizes: Mapping[str, Size], *, name: str) -> Summary:
    """Run the workload with fixed sizes under Slurm's own scheduler alone."""
    folder = stage.folder(name)
    # The plain run may take longer than the limit: only a stuck job should stop it.
    work = replace(stage.work, limit_s=3 * stage.work.limit_s)
    run = Run(work, env=cluster.client_environment, root=stage.root, folder=folder, sizes=sizes)
    with LiveView(stage.console, f"Plain Slurm: {name}", stage.work.gpus) as show:
        recording = run(show, lambda: None)
    batches = _plain_batches(recording, sizes)
    return Summary(recording, stage.work.gpus, _accuracies(run.results()), batches)


def _plain_batches(recording: Recording, sizes: Mapping[str, Size]) -> dict[int, Series]:
    """The batch size of each plain job, from its start."""
    return {
        t.job_id: [(t.submitted_at + (t.wait_s or 0.0), sizes[t.name].batch_size)]
        for t in recording.tracks.values()
        if t.name in sizes
    }


def draw(stage: Stage, summary: Summary, name: str, title: str) -> None:
    from .timeline import draw as picture  # noqa: PLC0415 - matplotlib takes a second to import: not while jobs run

    zero = summary.recording.started_at
    moves = [{"job_id": m.job_id, "at": m.at - zero} for m in summary.moves]
    picture(summary.document()["jobs"], moves, stage.out / name, capacity=stage.work.gpus, title=title)


def draw_side_by_side(stage: Stage, runs: dict[str, Summary]) -> None:
    from .timeline import draw_side_by_side as pictures  # noqa: PLC0415 - as above

    titled = [
        (
            f"{name}: mean completion {run.recording.mean_jct_s:.0f} s, {run.idle_gpu_s or 0.0:.0f} GPU-seconds idle",
            run.document()["jobs"],
        )
        for name, run in runs.items()
    ]
    pictures(titled, stage.out / "compare.png", capacity=stage.work.gpus)


def must_be_complete(summary: Summary) -> None:
    faults = summary.faults()
    if faults:
        raise RunFailedError("; ".join(faults))


def close_pollux_run(stage: Stage, summary: Summary) -> None:
    """Write, draw and print the results of the Pollux run."""
    console, work = stage.console, stage.work
    summary.write(stage.out / "summary.json")
    took = summary.recording.ended_at - summary.recording.started_at
    title = f"{len(work.trainings)} trainings on {work.gpus} GPUs under Pollux"
    draw(stage, summary, "timeline.png", title)
    console.print()
    console.print(job_table(summary))
    console.print()
    if summary.moves:
        console.print(
            f"{len(summary.moves)} moves: seconds, by part. In place: without a training step. Else: from the "
            "order to drain to the first step after it",
            style="bold",
            highlight=False,
        )
        console.print(move_table(summary.moves))
    console.print(
        f"\nMean completion time {summary.recording.mean_jct_s:.0f} s; the whole run took {took:.0f} s; "
        f"{summary.idle_gpu_s:.0f} of {summary.capacity * took:.0f} GPU-seconds stayed idle.",
        highlight=False,
    )
    console.print(
        f"Written: {stage.out}/summary.json, timeline.png, moves.txt, logs/",
        soft_wrap=True,
        highlight=False,
    )


def demo(stage: Stage, cluster: DevCluster) -> int:
    """Make the Pollux run alone.

    Returns:
        0 when every job completed and the summary is complete.

    Raises:
        RunFailedError: the run failed or its summary is incomplete.
    """
    summary = under_pollux(stage, cluster)
    close_pollux_run(stage, summary)
    must_be_complete(summary)
    stage.console.print("\nmoves.txt says why each move was made. In the last whole `make compare`:")
    stage.console.print(gain(measured()), style="bold", highlight=False, soft_wrap=True)
    return 0
