"""Start, stop or try the private cluster from a shell.

python -m contrib.devcluster up|down|shell [--directory D] [--nodes N] [--gpus G] [--lease S] [--accounting] [--polluxd]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from .cluster import DevCluster
from .errors import DevClusterError
from .polluxd import Polluxd
from .processes import descendants, kill_all, pids_of_cluster

_DEFAULT_DIRECTORY = Path("/tmp/pollux-devcluster")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m contrib.devcluster", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("action", choices=("up", "down", "shell"))
    parser.add_argument("--directory", type=Path, default=_DEFAULT_DIRECTORY)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=4, help="per node")
    parser.add_argument("--lease", type=float, default=120, help="seconds that #POLLUX jobs wait for polluxd")
    parser.add_argument(
        "--accounting", action="store_true", help="with slurmdbd and MariaDB: users and rights"
    )
    parser.add_argument(
        "--polluxd", action="store_true", help="shell: with polluxd, as docs/tutorial.md has it"
    )
    arguments = parser.parse_args()
    try:
        return run(arguments)
    except DevClusterError as error:
        print(f"devcluster: {error}", file=sys.stderr)
        return 1


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "down":
        return down(arguments.directory)
    if (arguments.directory / "running.json").exists():
        raise DevClusterError(f"a cluster already runs in {arguments.directory}: take it `down` first")
    cluster = DevCluster(
        arguments.directory,
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus,
        lease_s=arguments.lease,
        accounting=arguments.accounting,
    )
    if arguments.action == "up":
        try:
            cluster.start()
        except BaseException:
            cluster.stop()
            raise
        print(f"export SLURM_CONF={cluster.slurm_conf}")
        print(f"export POLLUX_DATABASE_URL={cluster.database_url}")
        return 0
    with cluster:
        extra = {"POLLUX_DATABASE_URL": cluster.database_url, "PS1": r"(devcluster) \w\$ "}
        daemon = Polluxd(cluster, arguments.directory) if arguments.polluxd else None
        if daemon is not None:
            daemon.start()
            extra["POLLUXD_CONFIG"] = str(daemon.config)
        print(f"{cluster.command('sinfo')}logs: {cluster.logs}; leave the shell to stop the cluster")
        shell = os.environ.get("SHELL", "/bin/bash")
        try:
            return subprocess.run([shell], env=cluster.client_environment | extra, check=False).returncode
        finally:
            if daemon is not None:
                daemon.stop()


def down(directory: Path) -> int:
    """Stop a cluster that `up` or a killed program left running."""
    record = directory / "running.json"
    try:
        facts = json.loads(record.read_text())
    except FileNotFoundError:
        raise DevClusterError(f"no cluster runs in {directory}") from None
    # A pid may have been given to somebody else since: only processes of this cluster are touched.
    ours = pids_of_cluster(Path(facts["slurm_conf"]))
    if (pid := facts.get("postgres_pid")) is not None and _is_postgres(pid, directory):
        os.kill(pid, signal.SIGINT)  # fast shutdown
        _wait_gone(pid, 10)
    kill_all(descendants(ours) | ours)
    record.unlink()
    return 0


def _is_postgres(pid: int, directory: Path) -> bool:
    try:
        return str(directory.absolute()).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _wait_gone(pid: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and Path(f"/proc/{pid}/cmdline").exists():
        try:
            if not Path(f"/proc/{pid}/cmdline").read_bytes():
                return  # a zombie that its parent has not reaped
        except OSError:
            return
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
