"""How far the report's replay is off, on logs of a real Slurm: three sites, from plain to mixed.

Each second of the private cluster counts as a minute of the log, so that trainings of an hour take a minute.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contrib.devcluster import DevCluster
from contrib.devcluster.interrupts import interruptible
from contrib.devcluster.processes import wait_until
from contrib.devcluster.slurmconf import SiteLines
from polluxd.site_report.job_log import COLUMNS

from .results import ROOT, parser_of, save
from .site_report import PAGE, placed_in

FOLDER = ROOT / "bench-out" / "replay"
TITLE = "## How far a replay is off, on three logs"
POLLUXCTL = Path(sys.executable).with_name("polluxctl")
STRETCH = 60
JOBS, SECONDS = 120, 150
NODES, GPUS = 4, 4
TIMES = ("Submit", "Eligible", "Start", "End")


@dataclass(frozen=True, slots=True)
class Site:
    """What a site's Slurm does beside first come, first served with backfill."""

    says: str
    lines: SiteLines = field(default_factory=SiteLines)
    partitions: Mapping[str, int] | None = None
    """By weight; None: the cluster's default one."""
    disturbed: bool = False
    """A node is drained in the middle, some jobs are cancelled, some fail, some depend on another."""


SITES = {
    "plain": Site("one partition, equal priorities, sched/backfill: the order that the replay assumes"),
    "tiers": Site(
        "two partitions on all nodes, and every fourth job's comes first",
        SiteLines(partitions={"first": "Nodes=n[1-4] PriorityTier=5 MaxTime=UNLIMITED State=UP"}),
        {"main": 3, "first": 1},
    ),
    "walls": Site(
        "two partitions with two nodes each, a node drained for a third of the time, jobs cancelled, failed and "
        "dependent on others",
        SiteLines(
            partitions={
                "left": "Nodes=n[1-2] MaxTime=UNLIMITED State=UP",
                "right": "Nodes=n[3-4] MaxTime=UNLIMITED State=UP",
            }
        ),
        {"left": 2, "right": 1},
        disturbed=True,
    ),
}


def played(cluster: DevCluster, site: Site) -> None:
    """Submit a drawn load of 1.2 times the cluster, and wait until all jobs have ended."""
    draw, begun = random.Random(7), time.monotonic()
    submitted: list[str] = []
    for job in range(JOBS):
        time.sleep(max(begun + SECONDS * job / JOBS - time.monotonic(), 0.0))
        if site.disturbed and job in (JOBS // 3, 2 * JOBS // 3):
            state = "drain" if job == JOBS // 3 else "resume"
            cluster.command("scontrol", "update", "nodename=n2", f"state={state}", "reason=fan")
        gpus = draw.choices([1, 2, 4, 8], [5, 3, 2, 1 if not site.disturbed else 0.5])[0]
        length = min(5 + draw.expovariate(1 / 8.0), 45)
        options = [f"--gres=gpu:{min(gpus, GPUS)}", f"--nodes={-(-gpus // GPUS)}", "--time=1"]
        if site.partitions is not None:
            names, weights = list(site.partitions), list(site.partitions.values())
            options.append(f"--partition={draw.choices(names, weights)[0]}")
        fails = site.disturbed and draw.random() < 0.1
        if site.disturbed and submitted and draw.random() < 0.1:
            options.append(f"--dependency=afterany:{submitted[-1]}")
        script = f"--wrap=sleep {length:.1f}{'; exit 3' if fails else ''}"
        shown = cluster.command(
            "sbatch",
            "--parsable",
            "--output=/dev/null",
            "--chdir=/",
            f"--job-name=train-{gpus}",
            *options,
            script,
        )
        submitted.append(shown.strip())
        if site.disturbed and draw.random() < 0.05:
            cluster.command("scancel", submitted[-1])
    wait_until(lambda: not cluster.command("squeue", "-h").strip(), 400, "all jobs to end")


def stretched(path: Path) -> float:
    """Make each second of a file of sacct's a minute, back from its last time; return its first submission."""
    header, *rows = path.read_text().splitlines()
    assert header.split("|") == list(COLUMNS)
    places = [COLUMNS.index(name) for name in TIMES]
    table = [row.split("|", len(COLUMNS) - 1) for row in rows]
    last = max(int(row[place]) for row in table for place in places if row[place].isdecimal())
    for row in table:
        for place in places:
            if row[place].isdecimal():
                row[place] = str(last - (last - int(row[place])) * STRETCH)
    path.write_text("\n".join(["|".join(row) for row in [list(COLUMNS), *table]]) + "\n")
    return float(min(int(row[places[0]]) for row in table))


def logged(name: str) -> None:
    """Play a site, and keep what its Slurm tells."""
    site, kept = SITES[name], FOLDER / name
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        Path(folder).chmod(0o755)
        cluster = DevCluster(
            Path(folder) / "c",
            nodes=NODES,
            gpus_per_node=GPUS,
            postgres=False,
            accounting=True,
            site=site.lines,
        )
        with cluster:
            played(cluster, site)
            time.sleep(3)  # slurmdbd writes the last end
            words = [str(POLLUXCTL), "report", "--commands", "--since", "30m"]
            commands = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            subprocess.run(["sh", "-ec", commands], env=cluster.client_environment, cwd=kept, check=True)


def measured(name: str) -> dict[str, Any]:
    """Return what the report says of a replay of a site's log."""
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        shutil.copytree(FOLDER / name, folder, dirs_exist_ok=True)
        first = stretched(Path(folder) / "sacct.txt")
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(first))
        files = [f"--sacct={folder}/sacct.txt", f"--nodes={folder}/nodes.txt", f"--json={folder}/out.json"]
        subprocess.run(
            [str(POLLUXCTL), "report", "--since", since, "--replay", "1000", *files], check=True, cwd=ROOT
        )
        found: dict[str, Any] = json.loads((Path(folder) / "out.json").read_text())["replay"]
    return found


def section(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield TITLE
    yield ""
    yield (
        f"`make bench-replay` submitted {JOBS} jobs of 5 to 45 s to a private Slurm of {NODES} nodes with {GPUS} "
        f"GPUs, 1.2 times what it has, for {SECONDS} s, once for each site, and gave sacct's text to `polluxctl "
        f"report --replay`. Each second counts as {STRETCH}: Slurm's own delays of a second or five stand for one to "
        "five minutes of the log, and are part of the error."
    )
    yield ""
    yield (
        "| site | jobs | mean wait, recorded [min] | simulated [min] | mean error per job [min] | mean completion "
        "off by | what the report tells |"
    )
    yield "|---|---:|---:|---:|---:|---:|---|"
    for name, row in found.items():
        error = row["error"]
        changes = [100 * change["change"] for change in row["changes"]]
        told = (
            f"{min(changes):+.0f} to {max(changes):+.0f} % under Pollux"
            if changes
            else "no change: it cannot tell"
        )
        yield (
            f"| {name}: {SITES[name].says} | {row['jobs']} | {error['recorded_wait_s'] / 60:.1f} | "
            f"{error['simulated_wait_s'] / 60:.1f} | {error['mean_error_s'] / 60:.1f} | "
            f"{100 * error['completion']:.0f} % | {told} |"
        )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--site", choices=SITES, action="append", help="play this one alone, again [default: all]"
    )
    parser.add_argument("--replay", action="store_true", help="play none: replay the logs that are kept")
    chosen = parser.parse_args()
    with interruptible():
        for name in [] if chosen.replay else chosen.site or SITES:
            logged(name)
    kept = [name for name in SITES if (FOLDER / name / "sacct.txt").exists()]
    found = {name: measured(name) for name in kept} if chosen.replay or not chosen.site else {}
    if found:
        save(FOLDER / "replays.json", found)
        placed_in(PAGE, TITLE, "\n".join(section(found)))


if __name__ == "__main__":
    main()
