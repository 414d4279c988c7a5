"""`make compare`: the same trainings under polluxd, and under plain Slurm with sizes chosen in four ways.

All arms run on the same cluster, one after the other, several times. The noise scales that tune the plain jobs are
those of the first run under polluxd. The last run is mixed: half of the jobs are plain ones beside polluxd.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from contrib.devcluster import DevCluster

from .gain import OURS, gain, seconds
from .mixed import MOST, plain_half, waits
from .plain import RULE, plain_arms
from .run import RunFailedError
from .scenes import (
    Stage,
    close_pollux_run,
    draw,
    draw_side_by_side,
    must_be_complete,
    under_plain_slurm,
    under_pollux,
)
from .summary import Summary
from .workload import Size, Workload


def compare(stage: Stage, cluster: DevCluster, runs: int, *, mixed: bool = True) -> int:
    """Run every arm so many times, and the mixed workload once.

    Returns:
        0 when all summaries are complete and plain jobs wait no longer beside Pollux jobs.

    Raises:
        RunFailedError: a run failed or its summary is incomplete.
    """
    arms: dict[str, list[Summary]] = {}
    sizes: dict[str, dict[str, Size]] = {}
    for number in range(1, runs + 1):
        ours = under_pollux(stage, cluster, name=f"pollux-{number}")
        must_be_complete(ours)
        _note(stage, arms, OURS, ours)
        if number == 1:
            close_pollux_run(stage, ours)
            sizes = sizes_under_plain_slurm(stage.work, ours)
            _tell(stage, sizes)
        for arm, chosen in sizes.items():
            plain = under_plain_slurm(
                stage, cluster, chosen, name=f"{''.join(c if c.isalnum() else '-' for c in arm)}-{number}"
            )
            must_be_complete(plain)
            _note(stage, arms, arm, plain)
    best = min(
        (name for name in arms if name != OURS), key=lambda name: arms[name][0].recording.mean_jct_s or 0.0
    )
    shown = {RULE: arms[RULE][0], best: arms[best][0], OURS: arms[OURS][0]}
    draw_side_by_side(
        stage, {name if name == OURS else f"plain Slurm, {name}": run for name, run in shown.items()}
    )
    stage.console.print()
    stage.console.print(_table(arms))
    harmed = mixed and _mixed(stage, cluster, sizes[RULE], arms)
    stage.console.print(f"Written: {stage.out}/compare.json, compare.png", soft_wrap=True, highlight=False)
    stage.console.print(gain(_document(stage.work, arms)), style="bold", highlight=False, soft_wrap=True)
    return int(harmed)


def sizes_under_plain_slurm(work: Workload, pollux: Summary) -> dict[str, dict[str, Size]]:
    """Return each training's size in each arm.

    Raises:
        RunFailedError: the run under polluxd did not measure the noise scale of some training.
    """
    missing = [t.name for t in work.trainings if t.adaptive and t.name not in pollux.noise_scale]
    if missing:
        raise RunFailedError(
            f"no noise scale was ever reported by {', '.join(missing)}: cannot tune the plain jobs"
        )
    return plain_arms(work, pollux.noise_scale)


def _note(stage: Stage, arms: dict[str, list[Summary]], arm: str, run: Summary) -> None:
    """Keep a run; write what there is, in case that a later one fails."""
    arms.setdefault(arm, []).append(run)
    (stage.out / "compare.json").write_text(
        json.dumps(_document(stage.work, arms, jobs=True), indent=1) + "\n"
    )


def _document(
    work: Workload,
    arms: Mapping[str, list[Summary]],
    *,
    jobs: bool = False,
    mixed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return `{workload, arms: {name: {mean_jct_s: [...], idle_gpu_s: [...]}}, jobs: {name: [...]}, mixed}`.

    A list has an entry per run, and `jobs` those of the first one, as in summary.json.
    """
    documents = {name: [run.document() for run in runs] for name, runs in arms.items()}
    return {
        "workload": f"{len(work.trainings)} trainings on {work.gpus} GPUs",
        "arms": {
            name: {key: [run[key] for run in found] for key in ("mean_jct_s", "idle_gpu_s")}
            for name, found in documents.items()
        },
        **({"jobs": {name: found[0]["jobs"] for name, found in documents.items()}} if jobs else {}),
        **({"mixed": dict(mixed)} if mixed else {}),
    }


def _mixed(
    stage: Stage, cluster: DevCluster, rule: Mapping[str, Size], arms: Mapping[str, list[Summary]]
) -> bool:
    """Run the workload with every second training as a plain job; tell whether these waited too long."""
    half = plain_half(stage.work, rule)
    stage.console.print(f"\nThe same workload under polluxd, with plain jobs: {', '.join(half)}.")
    mixed = under_pollux(stage, cluster, half, name="mixed")
    must_be_complete(mixed)
    waited = waits(mixed.recording, arms[RULE][0].recording, half)
    document = _document(stage.work, arms, jobs=True, mixed=waited.document())
    (stage.out / "compare.json").write_text(json.dumps(document, indent=1) + "\n")
    draw(stage, mixed, "timeline-mixed.png", f"The same trainings, plain jobs: {', '.join(half)}")
    stage.console.print()
    stage.console.print(waited.table())
    if waited.harmed:
        stage.console.print(
            f"Plain jobs waited longer than {MOST:g} times as long as without polluxd.", style="bold red"
        )
    return waited.harmed


def _tell(stage: Stage, sizes: Mapping[str, Mapping[str, Size]]) -> None:
    for arm, chosen in sizes.items():
        stage.console.print(f"\nPlain Slurm, {arm}:")
        for name, size in chosen.items():
            stage.console.print(
                f"  {name}: {size.gpus} GPUs on {size.nodes} node(s), batch size {size.batch_size}, "
                f"{size.epochs:.1f} epochs, learning rate {size.lr:.3g}",
                highlight=False,
            )


def _table(arms: Mapping[str, list[Summary]]) -> Table:
    """Return a table of the completion times: by training in the first run, and the mean over all runs."""
    table = Table(
        title="Completion times [s]", title_justify="left", pad_edge=False, box=None, header_style="bold"
    )
    table.add_column("name")
    for name in arms:
        table.add_column(name, justify="right")
    jobs = {name: {job["name"]: job for job in runs[0].document()["jobs"]} for name, runs in arms.items()}
    for job in jobs[OURS]:
        table.add_row(job, *(f"{found[job]['jct_s']:.0f}" for found in jobs.values()))
    table.add_section()
    means = ({"mean_jct_s": [run.recording.mean_jct_s for run in runs]} for runs in arms.values())
    table.add_row("mean", *map(seconds, means))
    return table
