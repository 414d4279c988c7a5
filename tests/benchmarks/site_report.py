"""`polluxctl report` on Philly's log and on a million generated records: seconds, memory and what it says."""

from __future__ import annotations

import heapq
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from polluxd.site_report.job_log import COLUMNS

from .results import ROOT, parser_of

PAGE = ROOT / "tests" / "benchmarks" / "philly.md"
RECORDS = 1_000_000
DAYS, NODES, GPUS = 90, 400, 8
STATES = {"COMPLETED": 70, "FAILED": 15, "CANCELLED by 12": 10, "TIMEOUT": 4, "NODE_FAIL": 1}


def generate(path: Path, count: int) -> None:
    """Write sacct's text of jobs that a cluster could have run: no node holds more GPUs than it has."""
    draw = random.Random(1)
    free, running, now = [GPUS] * NODES, [], 1_700_000_000.0
    with path.open("w") as file:
        print("|".join(COLUMNS), file=file)
        for job in range(count):
            now += draw.expovariate(count / (86400 * DAYS))
            while running and running[0][0] <= now:
                _, node, held = heapq.heappop(running)
                free[node] += held
            gpus, waited = draw.choice([1, 1, 1, 2, 4, 8]), draw.choice([0.0, draw.expovariate(1 / 900)])
            node = next((n for n in (draw.randrange(NODES) for _ in range(20)) if free[n] >= gpus), None)
            tres = f"billing={gpus},cpu={gpus * 4},gres/gpu={gpus},mem={gpus * 32}G,node=1"
            who = f"{draw.choice(['gpu', 'gpu', 'short', 'long'])}|acc{draw.randrange(30)}|u{draw.randrange(300)}"
            asked = f"{now - waited:.0f}|{now - waited:.0f}"
            name = draw.choice(["train", "eval", f"resnet-{job % 997}", "sweep|x", "a<b>"])
            if node is None:
                row = (
                    f"{who}|CANCELLED by 4|{asked}|{now:.0f}|{now:.0f}|00:00:00|1440|1|{tres}||None assigned"
                )
            else:
                free[node] -= gpus
                ended = now + min(draw.lognormvariate(7.0, 1.6), 86400.0 * 3)
                heapq.heappush(running, (ended, node, gpus))
                (state,) = draw.choices(list(STATES), list(STATES.values()))
                row = f"{who}|{state}|{asked}|{now:.0f}|{ended:.0f}|00:00:00|1440|1|{tres}|{tres}|n{node}"
            print(f"{job}|{job}|{row}|{name}", file=file)


def measured(path: Path, *words: str) -> str:
    """Run the command; return what it says, its seconds and its memory, as a section of the page."""
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-m", "polluxd.cli.ctl", "report", "--sacct", str(path), *words]
    with tempfile.TemporaryDirectory() as folder:
        out = [f"--html={folder}/r.html", f"--json={folder}/r.json"]
        peak = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
        peak += "print('PEAK', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        done = subprocess.run(
            [sys.executable, "-c", peak, *command, *out], capture_output=True, text=True, check=True, cwd=ROOT
        )
    said, _, kilobytes = done.stdout.partition("PEAK ")
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    return (
        f"{cpu:.0f} s of CPU, {time.monotonic() - begun:.0f} s on the clock, {int(kilobytes) / 1e6:.2f} GB; with page "
        f"and JSON.\n\n```text\n{said.strip()}\n```\n"
    )


def placed_in(page: Path, title: str, text: str) -> None:
    """Put a section in the place of the one with this title, or at the end of the page."""
    parts = re.split(r"(?m)^(?=## )", page.read_text())
    place = next((n for n, part in enumerate(parts) if part.startswith(f"{title}\n")), len(parts))
    parts[place : place + 1] = [text]
    page.write_text("\n\n".join(part.strip() for part in parts) + "\n")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--records", type=int, default=RECORDS, help="0: leave that section as it is")
    chosen = parser.parse_args()
    philly = ROOT / os.environ.get("POLLUX_OSDI21", "../shared/data/osdi21") / "philly.csv"
    text = [
        "# The site report on Philly's log, and on a million records",
        "`make bench-report` wrote this page, on two CPU cores that other work used, too: seconds of CPU "
        "are the report, seconds on the clock the machine. "
        "[What a cluster loses](../../docs/administrator-guide/report.md) explains the lines.",
        "## Philly, 82,247 jobs",
        "The CSV of the OSDI 2021 artifact has one time per job, a duration and a number of GPUs: no waits, no states, "
        "no nodes. So the report knows the hours held; capacity is the most that each virtual cluster held at a time.",
        measured(philly, "--replay", "300") if philly.exists() else "The data are not here.",
    ]
    if chosen.records:
        text += [
            f"## {chosen.records:,} generated records",
            f"{DAYS} days of {NODES} nodes with {GPUS} GPUs; starts, waits and lengths at random, separators in names.",
        ]
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "sacct.txt"
            generate(log, chosen.records)
            text.append(measured(log))
    before = re.split(r"(?m)^(?=## )", PAGE.read_text())[1:] if PAGE.exists() else []
    PAGE.write_text("\n\n".join(text).rstrip() + "\n")
    for part in before:  # sections of other programs
        if (title := part.partition("\n")[0]) not in text:
            placed_in(PAGE, title, part)


if __name__ == "__main__":
    main()
