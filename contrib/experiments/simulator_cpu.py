"""Measure the CPU seconds of one `polluxctl simulate` of 160 jobs.

    python -m contrib.experiments.simulator_cpu [--data DIR] [--page FILE]

It writes contrib/experiments/simulator_cpu.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
PAGE = Path(__file__).with_suffix(".md")
WORKLOAD = "workload-6"
RUNS = 3
HEADING = "# CPU of one command\n"


def cpu_of(command: list[str]) -> float:
    """Return the median CPU seconds of a command, user and system."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'agent'}"}
    found = []
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return median(found)


def section(data: Path) -> str:
    """Return the page; it takes half a minute."""
    trace = str(data / "workloads" / f"{WORKLOAD}.csv")
    options = ["--profiles", str(data / "profiles"), "--policy", "pollux", "--objective", "completion-time"]
    imports = cpu_of(["-c", "import polluxd.cli.ctl, polluxd.cli.simulate"])
    whole = cpu_of(["-m", "polluxd.cli.ctl", "simulate", trace, *options])
    python, load = f"{platform.machine()}, Python {platform.python_version()}", os.getloadavg()[0]
    return f"""{HEADING}
`polluxctl simulate {WORKLOAD}.csv --profiles profiles --policy pollux` takes {whole:.1f} s of CPU. Imports take
{imports:.1f} s of these (`contrib.experiments.simulator_cpu`: median of {RUNS} runs of one thread, on
{os.cpu_count()} cores shared with other work, at a load of {load:.0f}; {python}).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ROOT / os.environ.get("POLLUX_OSDI21", "../shared/data/osdi21")
    parser.add_argument("--data", type=Path, default=default, help="folder of profiles/ and workloads/")
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args()
    asked.page.write_text(section(asked.data))
    print(f"wrote {asked.page}")


if __name__ == "__main__":
    main()
