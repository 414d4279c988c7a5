"""The runs of the demo: under Pollux, under plain Slurm, and mixed.

`demo` makes the Pollux run alone. `compare` makes all three.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any

from rich.console import Console
from rich.table import Table

from contrib.devcluster import DevCluster

from .live import LiveView
from .measure import Recording
from .mixed import MOST, plain_half, waits
from .plain import tuned_sizes
from .pollux_side import Database, Polluxd
from .run import Run, RunFailedError
from .summary import Series, Summary, job_table, move_table
from .workload import Size, Workload

LAST_REPORT_S = 3.0
"""Time for the agents' last reports and polluxd's last writes after the last job has ended [s]."""
PICTURE_S = 10.0
"""When the live page is pictured, after the last submission: agents have reported by then [s]."""
COMPARISON = Path(__file__).with_name("comparison.json")
"""Mean completion times and idle GPU-seconds of a whole `make compare`; `make docs-images` writes it."""


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


def _under_pollux(stage: Stage, cluster: DevCluster, plain: Mapping[str, Size] | None = None) -> Summary:
    """Run the workload under polluxd.

    Args:
        plain: the jobs that are plain jobs of these sizes; polluxctl then reports on none.
    """
    plain = plain or {}
    folder = stage.folder("mixed" if plain else "pollux")
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
            daemon.write_report(stage.out, recording.started_at, recording.ended_at)
        summary = Summary(
            recording,
            work.gpus,
            _accuracies(run.results()),
            database.batch_sizes() | _plain_batches(recording, plain),
            [move for move in database.moves() if move.job_id in names],
            database.noise_scales(names),
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


def _under_plain_slurm(stage: Stage, cluster: DevCluster, sizes: Mapping[str, Size]) -> Summary:
    """Run the workload with fixed sizes under Slurm's own scheduler alone."""
    folder = stage.folder("plain-slurm")
    # The plain run may take longer than the limit: only a stuck job should stop it.
    work = replace(stage.work, limit_s=3 * stage.work.limit_s)
    run = Run(work, env=cluster.client_environment, root=stage.root, folder=folder, sizes=sizes)
    with LiveView(stage.console, "Plain Slurm", stage.work.gpus) as show:
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


def _draw(stage: Stage, summary: Summary, name: str, title: str) -> None:
    from .timeline import draw  # noqa: PLC0415 - matplotlib takes a second to import: not while jobs run

    zero = summary.recording.started_at
    moves = [{"job_id": m.job_id, "at": m.at - zero} for m in summary.moves]
    draw(summary.document()["jobs"], moves, stage.out / name, capacity=stage.work.gpus, title=title)


def _draw_side_by_side(stage: Stage, runs: dict[str, Summary]) -> None:
    from .timeline import draw_side_by_side  # noqa: PLC0415 - as above

    titled = [
        (
            f"{name}: mean completion {run.recording.mean_jct_s:.0f} s, {run.idle_gpu_s or 0.0:.0f} GPU-seconds idle",
            run.document()["jobs"],
        )
        for name, run in runs.items()
    ]
    draw_side_by_side(titled, stage.out / "compare.png", capacity=stage.work.gpus)


def _must_be_complete(summary: Summary) -> None:
    faults = summary.faults()
    if faults:
        raise RunFailedError("; ".join(faults))


def _close_pollux_run(stage: Stage, summary: Summary) -> None:
    """Write, draw and print the results of the Pollux run."""
    console, work = stage.console, stage.work
    summary.write(stage.out / "summary.json")
    took = summary.recording.ended_at - summary.recording.started_at
    title = f"{len(work.trainings)} trainings on {work.gpus} GPUs under Pollux"
    _draw(stage, summary, "timeline.png", title)
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
        f"Written: {stage.out}/summary.json, timeline.png, report.txt, logs/",
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
    summary = _under_pollux(stage, cluster)
    _close_pollux_run(stage, summary)
    _must_be_complete(summary)
    measured = json.loads(COMPARISON.read_text())
    stage.console.print("\nreport.txt says why each move was made. In the last whole `make compare`:")
    stage.console.print(gain(measured), style="bold", highlight=False, soft_wrap=True)
    return 0


def gain(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what polluxd gained against plain Slurm in one sentence; `runs` as in compare.json."""
    ours, theirs = runs["pollux"], runs["plain_slurm"]
    change = 100 * (1 - ours["mean_jct_s"] / theirs["mean_jct_s"])
    return (
        f"Under polluxd a training ended after {ours['mean_jct_s']:.0f} s on average, under plain Slurm after "
        f"{theirs['mean_jct_s']:.0f} s: {abs(change):.0f} % {'sooner' if change >= 0 else 'later'}, with "
        f"{ours['idle_gpu_s']:.0f} instead of {theirs['idle_gpu_s']:.0f} idle GPU-seconds."
    )


def _comparison(pollux: Summary, plain: Summary, sizes: Mapping[str, Size]) -> Table:
    table = Table(
        title="Pollux and plain Slurm", title_justify="left", pad_edge=False, box=None, header_style="bold"
    )
    table.add_column("name")
    for title in (
        "completed Pollux",
        "completed plain",
        "accuracy Pollux",
        "accuracy plain",
        "GPUs plain",
        "batch plain",
    ):
        table.add_column(title, justify="right")
    theirs = {job["name"]: job for job in plain.document()["jobs"]}
    for job in pollux.document()["jobs"]:
        other, size = theirs[job["name"]], sizes[job["name"]]
        table.add_row(
            *(job["name"], f"{job['jct_s']:.0f} s", f"{other['jct_s']:.0f} s"),
            *(f"{job['accuracy']:.3f}", f"{other['accuracy']:.3f}", str(size.gpus), str(size.batch_size)),
        )
    mean, mean_plain = pollux.recording.mean_jct_s or 0.0, plain.recording.mean_jct_s or 0.0
    table.add_section()
    table.add_row("mean", f"{mean:.0f} s", f"{mean_plain:.0f} s")
    return table


def plain_sizes(work: Workload, pollux: Summary) -> dict[str, Size]:
    """Return each training's fixed size under plain Slurm, by name.

    Raises:
        RunFailedError: the Pollux run did not measure the noise scale of some training.
    """
    missing = [t.name for t in work.trainings if t.adaptive and t.name not in pollux.noise_scale]
    if missing:
        raise RunFailedError(
            f"no noise scale was ever reported by {', '.join(missing)}: cannot tune the plain jobs"
        )
    return tuned_sizes(work, pollux.noise_scale)


def compare(stage: Stage, cluster: DevCluster) -> int:
    """Make the three runs on the same cluster, one after the other.

    Returns:
        0 when all summaries are complete and plain jobs wait no longer beside Pollux jobs.

    Raises:
        RunFailedError: a run failed or its summary is incomplete.
    """
    pollux = _under_pollux(stage, cluster)
    _close_pollux_run(stage, pollux)
    _must_be_complete(pollux)
    sizes = plain_sizes(stage.work, pollux)
    stage.console.print("\nThe same workload under plain Slurm, sizes as a careful user would tune them:")
    for name, size in sizes.items():
        stage.console.print(
            f"  {name}: {size.gpus} GPUs on {size.nodes} node(s), batch size {size.batch_size}, "
            f"{size.epochs:.1f} epochs, learning rate {size.lr:.3g}",
            highlight=False,
        )
    plain = _under_plain_slurm(stage, cluster, sizes)
    _must_be_complete(plain)
    half = plain_half(stage.work, sizes)
    stage.console.print(f"\nThe same workload under polluxd, with plain jobs: {', '.join(half)}.")
    mixed = _under_pollux(stage, cluster, half)
    _must_be_complete(mixed)
    waited = waits(mixed.recording, plain.recording, half)
    runs = {
        name: {key: document[key] for key in ("mean_jct_s", "idle_gpu_s", "jobs")}
        for name, document in (
            ("pollux", pollux.document()),
            ("plain_slurm", plain.document()),
            ("mixed", mixed.document()),
        )
    }
    runs["mixed"] |= waited.document()
    (stage.out / "compare.json").write_text(json.dumps(runs, indent=1) + "\n")
    _draw(stage, plain, "timeline-plain-slurm.png", "The same trainings under plain Slurm, sizes fixed")
    _draw(stage, mixed, "timeline-mixed.png", f"The same trainings, plain jobs: {', '.join(half)}")
    _draw_side_by_side(stage, {"plain Slurm": plain, "polluxd": pollux})
    stage.console.print()
    stage.console.print(_comparison(pollux, plain, sizes))
    stage.console.print()
    stage.console.print(waited.table())
    stage.console.print(f"Written: {stage.out}/compare.json, compare.png", soft_wrap=True, highlight=False)
    stage.console.print(gain(runs), style="bold", highlight=False, soft_wrap=True)
    if waited.harmed:
        stage.console.print(
            f"Plain jobs waited longer than {MOST:g} times as long as without polluxd.", style="bold red"
        )
    return int(waited.harmed)
