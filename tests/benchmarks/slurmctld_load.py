"""Measure what polluxd costs a real slurmctld with 5,500 jobs.

5,000 jobs wait, and 500 run.

The running jobs sleep on stand-in GPUs; all jobs are Pollux jobs, so polluxd renews 5,000 leases. CPU time is that of
slurmctld's process, over the same span without polluxd and with it, at polluxd's default pace. Run it by
`make bench-slurmctld`, as root.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from contrib.commit import COMMIT
from contrib.devcluster import DevCluster, write_configuration
from contrib.devcluster.polluxd import BIN
from contrib.devcluster.processes import Daemon
from tests.benchmarks.results import save
from tests.benchmarks.store_load import cpu_seconds

NODES, PER_NODE = 4, 125
GPUS = NODES * PER_NODE
AIM = 0.02
"""Of a core."""
_RPC = re.compile(
    r"^\s+(REQUEST_\w+)\s+\(\s*\d+\) count:(\d+)\s+ave_time:\d+\s+total_time:(\d+)", re.MULTILINE
)


def submit(cluster: DevCluster, folder: Path, jobs: int) -> None:
    script = folder / "job"
    script.write_text("#!/bin/sh\n#POLLUX max-gpus=4\nexec sleep 86400\n")
    words = ("sbatch", "--gres=gpu:1", "--time=1440", "--output=/dev/null", str(script))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: cluster.command(*words), range(jobs)))


def states(cluster: DevCluster) -> dict[str, int]:
    found = cluster.command("squeue", "-h", "-o", "%T").split()
    return {state: found.count(state) for state in sorted(set(found))}


def rpcs(cluster: DevCluster) -> dict[str, tuple[int, float]]:
    """Count and time [s] of each kind of request since the last reset."""
    text = cluster.command("sdiag").partition("Remote Procedure Call statistics by user")[0]
    return {name: (int(count), int(total) / 1e6) for name, count, total in _RPC.findall(text)}


def span(cluster: DevCluster, pid: int, seconds: float) -> tuple[float, dict[str, tuple[int, float]]]:
    """Return slurmctld's share of a core over the span, and its requests."""
    cluster.command("sdiag", "--reset")
    used, begun = cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_seconds(pid) - used) / (time.monotonic() - begun), rpcs(cluster)


def controller(cluster: DevCluster) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"slurmctld") and str(cluster.slurm_conf).encode() in words:
            return int(folder.name)
    raise RuntimeError("slurmctld does not run")


def measure(waiting: int, running: int, seconds: float) -> dict[str, Any]:
    base = Path(tempfile.mkdtemp(prefix="pollux-rpc-", dir="/tmp"))
    base.chmod(0o755)
    with DevCluster(
        base / "cluster",
        nodes=NODES,
        gpus_per_node=PER_NODE,
        cpus_per_node=PER_NODE,
        memory_mb=64000,
        lease_s=3600,
        heartbeat_stale_s=1.0,
    ) as cluster:
        submit(cluster, base, running)  # no sign of life of polluxd: they start as plain jobs
        while states(cluster).get("RUNNING", 0) < running:
            time.sleep(2)
            # 500 starts at one time are too many for a busy machine: Slurm holds a job whose prolog took too long.
            if held := cluster.command("squeue", "-h", "-t", "PENDING", "-o", "%i").split():
                cluster.command("scontrol", "release", ",".join(held))
        # From here on the hook keeps jobs back, as where polluxd is alive.
        cluster.hooks.write_submit_hook(heartbeat_stale_s=1e9)
        cluster.hooks.heartbeat_file.write_text(f"{time.time():.0f}\n")
        time.sleep(2)
        submit(cluster, base, waiting)
        print(f"submitted: {states(cluster)}", flush=True)
        pid = controller(cluster)
        time.sleep(20)
        without, _ = span(cluster, pid, seconds)
        print(f"without polluxd: {100 * without:.2f} % of a core", flush=True)
        write_configuration(cluster, base / "polluxd.toml")
        command = [str(BIN / "polluxd"), "run", "--config", str(base / "polluxd.toml")]
        daemon = Daemon("polluxd", command, base / "polluxd.log", env=cluster.client_environment)
        daemon.start()
        try:
            time.sleep(45)  # it has seen all jobs, and decided
            own = cpu_seconds(daemon.pid)
            with_it, asked = span(cluster, pid, seconds)
            own = (cpu_seconds(daemon.pid) - own) / seconds
            daemon.must_run()
        finally:
            daemon.stop(grace_s=60)
        return {
            "waiting": waiting,
            "running": running,
            "seconds": seconds,
            "slurmctld_without": round(without, 4),
            "slurmctld_with": round(with_it, 4),
            "by_polluxd": round(with_it - without, 4),
            "polluxd": round(own, 4),
            "states": states(cluster),
            "rpcs": {
                name: {"per_s": round(count / seconds, 2), "share": round(total / seconds, 4)}
                for name, (count, total) in sorted(asked.items(), key=lambda item: -item[1][1])
            },
        }


def write_page(path: Path, found: dict[str, Any]) -> None:
    rows = [
        f"| {name} | {one['per_s']:g} | {100 * one['share']:.2f} % |"
        for name, one in list(found["rpcs"].items())[:6]
    ]
    table = "\n".join(rows)
    waiting, running, seconds = (found[name] for name in ("waiting", "running", "seconds"))
    path.write_text(f"""# Load on slurmctld

`make bench-slurmctld` (as root) runs a real Slurm with {waiting:,} waiting and {running:,} running Pollux jobs on
{GPUS:,} stand-in GPUs, without polluxd and with it, for {seconds:.0f} s each. polluxd has its default pace: a look
every 5 s, a decision every minute, at most 15 leases renewed a second. Commit {COMMIT}.

| measured | share of a core |
|---|---|
| slurmctld without polluxd | {100 * found["slurmctld_without"]:.2f} % |
| slurmctld with polluxd | {100 * found["slurmctld_with"]:.2f} % |
| difference (aim: below 2 %) | {100 * found["by_polluxd"]:.2f} % |
| polluxd itself, its Slurm commands included | {100 * found["polluxd"]:.2f} % |

Slurm's own account of requests while polluxd ran (`sdiag`), the most expensive first:

| request | per second | share of a core |
|---|---|---|
{table}
""")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--waiting", type=int, default=5000)
    parser.add_argument("--running", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.waiting, arguments.running, arguments.seconds)
    save(Path("bench-out/slurmctld_load.json"), found)
    print(json.dumps(found, indent=1))
    if arguments.page:
        write_page(arguments.page, found)
    return 0 if found["by_polluxd"] < AIM else 1


if __name__ == "__main__":
    sys.exit(main())
