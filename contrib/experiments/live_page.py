"""What `polluxctl web` costs with 1,000 jobs: `contrib.experiments.live_page`, as root.

The database is that of `bench-scale`: polluxd decided on the jobs, and each running job reported after each cycle. The
cycles are then set apart over six hours, so that the page draws as much as it ever does. A browser's looks at the page
are sent over HTTP, with the pauses of page.js.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from http.cookiejar import CookieJar
from pathlib import Path
from statistics import median
from typing import Any

from sqlalchemy import create_engine, text

from contrib.devcluster.postgres import DevPostgres
from tests.benchmarks.results import save
from tests.benchmarks.scale import CLUSTER, PER_NODE, measure
from tests.benchmarks.store_load import cpu_seconds

INTERVAL_S = 5.0
LASTS_S = 60.0
AIMS = {"slowest_s": 0.5, "core_percent": 5.0}
_SPREAD = """
UPDATE pollux.cycle SET started_at = now() - (m.newest - id) * interval '5 minutes' / 2 FROM (
    SELECT max(id) AS newest FROM pollux.cycle) m;
UPDATE pollux.job SET submitted_at = submitted_at - interval '6 hours', started_at = started_at - interval '6 hours';
"""
_LONGEST = "SELECT job_id FROM pollux.report_history GROUP BY 1 ORDER BY count(*) DESC LIMIT 1"


def looks(found: dict[str, Any]) -> Callable[[DevPostgres], None]:
    """Return what looks at the pages for some minutes, and fills in `found`."""

    def look(postgres: DevPostgres) -> None:
        database = create_engine(postgres.url)
        with database.begin() as connection:
            connection.execute(text(_SPREAD))
            job = connection.execute(text(_LONGEST)).scalar_one()
        database.dispose()
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "polluxd.toml"
            config.touch(0o600)
            config.write_text(f'[slurm]\ncluster = "{CLUSTER}"\n[database]\nurl = "{postgres.url}"\n')
            polluxctl = Path(sys.executable).parent / "polluxctl"
            command = [polluxctl, "web", "--config", config, "-n", str(INTERVAL_S)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
                url = server.stdout.readline().strip()
                browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
                browser.open(url).read()
                for name, page in (("cluster", "?part"), ("job", f"jobs/{job}?part")):
                    found[name] = _watched(browser, url.partition("?")[0] + page, server.pid, postgres.pid)
                server.terminate()

    return look


def _cpu_of_children(pid: int) -> float:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(cpu_seconds(int(child)) for child in children)


def _watched(browser: Any, url: str, server: int, database: int) -> dict[str, float]:
    begin = time.monotonic()
    browser.open(url).read()
    first, waits, size = time.monotonic() - begin, [], 0
    begin, used, stored = time.monotonic(), cpu_seconds(server), _cpu_of_children(database)
    while time.monotonic() - begin < LASTS_S:
        time.sleep(INTERVAL_S)
        asked = time.monotonic()
        size = len(browser.open(url).read())
        waits.append(time.monotonic() - asked)
    lasted = time.monotonic() - begin
    return {
        "first_s": round(first, 3),
        "median_s": round(median(waits), 3),
        "slowest_s": round(max(waits), 3),
        "core_percent": round(100 * (cpu_seconds(server) - used) / lasted, 2),
        "database_core_percent": round(100 * (_cpu_of_children(database) - stored) / lasted, 2),
        "kilobytes": round(size / 1024),
    }


_PAGE = """# The live page

`contrib.experiments.live_page` (as root) serves `polluxctl web` to a browser's HTTP requests, every
{interval:g} s for a minute. polluxd has decided {cycles} times on {jobs:,} jobs and {gpus:,} GPUs, in a real
Postgres. The first look reads all. What was slow to read is then read more seldom. CPU is that of the page's
process and of Postgres, in percent of a core.

| page | first look [s] | median later look [s] | slowest [s] | CPU | CPU of Postgres | KB a look |
|---|---|---|---|---|---|---|
{rows}

Aims: every later look under {slowest_s:g} s, the process under {core_percent:g} % of a core.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=256)
    parser.add_argument("--cycles", type=int, default=40)
    parser.add_argument("--json", type=Path, default=Path("bench-out/live_page.json"))
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    measure(given.jobs, given.cycles, given.nodes, looks(found))
    missed = [f"{page}.{key}" for page in found for key, aim in AIMS.items() if found[page][key] >= aim]
    save(given.json, found | {"missed": missed})
    print(json.dumps(found | {"missed": missed}, indent=1))
    if given.page:
        rows = "\n".join(
            f"| {name} | {' | '.join(f'{v:g}' for v in page.values())} |" for name, page in found.items()
        )
        size = {"jobs": given.jobs, "gpus": given.nodes * PER_NODE, "cycles": given.cycles}
        given.page.write_text(_PAGE.format(rows=rows, interval=INTERVAL_S, **size, **AIMS))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
