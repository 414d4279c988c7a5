"""`make first-contact`: what a new user meets, on a real cluster and in a real browser.

The blocks of README.md and docs/start.md run in a fresh virtual environment, ordinary mistakes are made, and Chromium
opens the site, a report, and `polluxctl web` as an administrator and as an ordinary user, both also among 300 jobs.
bench-out/first-contact.json has a row for each; the exit status is 1 where one is not as it should be. Run it as root.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from contrib.devcluster import DevCluster, Polluxd

from .blocks import Environment, block_rows, submit_block, tutorial_row
from .mistakes import agent_rows, command_rows, directive_rows
from .pages import many_rows, page_rows, until
from .site import site_rows
from .users import ADA, BOB, as_user, many, train

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
SEEN = ROOT / "tests" / "benchmarks" / "first_contact.json"
MANY = 300
"""Jobs among which the page is used."""


def main() -> int:
    out = ROOT / "bench-out" / "first-contact.json"
    out.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pollux-first-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        print("a fresh virtual environment with the agent", flush=True)
        fresh = Environment(ROOT, folder / "venv")
        found = {"blocks": block_rows(fresh, folder / "blocks"), "mistakes": agent_rows(fresh, folder)}
        print("the documentation's site", flush=True)
        found["site"] = site_rows(ROOT, folder)
        print("the tutorial", flush=True)
        found["blocks"].append(tutorial_row(fresh, folder))
        print("a private cluster", flush=True)
        size = {"nodes": 4, "gpus_per_node": 4, "cpus_per_node": 32}
        with DevCluster(folder / "cluster", **size, heartbeat_stale_s=180) as cluster:
            jobs = folder / "jobs"
            jobs.mkdir()
            jobs.chmod(0o1777)
            daemon = Polluxd(cluster, jobs)
            daemon.start()
            try:
                until(cluster.hooks.heartbeat_file.exists)  # which tells the hook how large the cluster is
                found["mistakes"] += directive_rows(cluster, jobs) + command_rows(cluster)
                for page in ("README.md", "docs/start.md"):
                    found["blocks"].append(submit_block(fresh, cluster, jobs, page))
                own = train(cluster, ROOT, jobs, ADA, "conv-a"), train(cluster, ROOT, jobs, ADA, "waits", 16)
                others = train(cluster, ROOT, jobs, BOB, "conv-b")
                as_user(BOB, ["sbatch", "--gres=gpu:2", "--wrap", "sleep 600"], cluster, jobs)
                found["page"] = page_rows(cluster, daemon.config, own, others, IMAGES)
                print(f"{MANY} jobs", flush=True)
                failed, plain = many(cluster, jobs, MANY)
                found["page"] += many_rows(cluster, daemon.config, failed, plain, MANY, out.parent)
            finally:
                daemon.stop()
    rows = [row for part in found.values() for row in part]
    out.write_text(json.dumps(found, indent=1) + "\n")
    SEEN.write_text(json.dumps({part: found[part] for part in ("page", "site")}, indent=1) + "\n")
    for row in rows:
        print(
            "ok  " if row["ok"] else "FAIL", *[value for key, value in row.items() if key != "ok"], sep="  "
        )
    print(f"{sum(row['ok'] for row in rows)} of {len(rows)} as they should be; written: {out}")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
