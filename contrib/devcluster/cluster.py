"""A private Slurm cluster with stand-in GPUs, and its Postgres."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from polluxd.store import Store

from .accounting import DevAccounting
from .errors import DevClusterError
from .gateways import Gateways
from .hooks import Hooks
from .postgres import DevPostgres
from .processes import MARK, Daemon, descendants, free_ports, kill_all, pids_of_cluster, program, wait_until
from .slurmconf import Layout, SiteLines, gres_conf, slurm_conf

_LONGEST_SOCKET_NAME = 107  # sockaddr_un.sun_path, unix(7)


class DevCluster:
    """A private Slurm cluster on this machine, with a Postgres that has polluxd's schema.

    It runs munged, slurmctld, Postgres, gateways, and `nodes` slurmd with `gpus_per_node` stand-in GPUs each. A job
    runs as the user who submits it. The Python interpreter of this process comes first in the job's PATH.

    Args:
        directory: all data and logs; must be reachable by user `postgres` (so not below root's home).
        lease_s: how long the submission hook keeps an opted-in job back for polluxd [s].
        heartbeat_stale_s: age of `hooks.heartbeat_file` [s] from which the hook takes polluxd for dead and lets
            opted-in jobs start as plain ones; None: the hook does not look.
        publish_interval_s: time between two reports of a job [s].
        gateways: number of gateways.
        postgres: False leaves the database and the gateways out.
        accounting: True adds slurmdbd and MariaDB, and with them users and rights: `daemon_user` becomes an Operator,
            which the submission hook trusts. Needed to run polluxd unprivileged and to shrink a running job.
        daemon_user: polluxd's account, where it is not root; must exist.
        site: what a site adds to slurm.conf.
    """

    def __init__(  # noqa: PLR0913 - each a choice of a test
        self,
        directory: Path | str,
        *,
        nodes: int = 4,
        gpus_per_node: int = 4,
        cpus_per_node: int = 8,
        memory_mb: int = 4000,
        gpu_type: str = "",
        lease_s: float = 120,
        heartbeat_stale_s: float | None = None,
        publish_interval_s: float = 2.0,
        gateways: int = 1,
        cluster_name: str = "dev",
        postgres: bool = True,
        accounting: bool = False,
        daemon_user: str = "root",
        site: SiteLines | None = None,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.cluster_name = cluster_name
        self.postgres: DevPostgres | None = DevPostgres(self.directory / "postgres") if postgres else None
        ports = free_ports(nodes + 1 + gateways)
        self._layout = Layout(
            directory=self.directory,
            cluster_name=cluster_name,
            hostname=socket.gethostname().split(".")[0],
            nodes=tuple(f"n{i + 1}" for i in range(nodes)),
            gpus_per_node=gpus_per_node,
            cpus_per_node=cpus_per_node,
            memory_mb=memory_mb,
            gpu_type=gpu_type,
            slurmctld_port=ports[0],
            slurmd_ports=tuple(ports[1 : nodes + 1]),
            site=site or SiteLines(),
        )
        self._accounting = DevAccounting(self._layout) if accounting else None
        self.daemon_user = pwd.getpwnam(daemon_user)
        self.gateways = Gateways(
            self._layout, ports[nodes + 1 :], self.daemon_user, publish_interval_s=publish_interval_s
        )
        self.hooks = Hooks(
            self._layout,
            self.daemon_user,
            self.gateways.addresses,
            lease_s=lease_s,
            heartbeat_stale_s=heartbeat_stale_s,
        )
        self.munged: Daemon | None = None
        self._slurmctld: Daemon | None = None
        self._slurmd: dict[str, Daemon] = {}

    # --- what the users of the cluster need to know ------------------------------------------------

    @property
    def slurm_conf(self) -> Path:
        return self._layout.etc / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """What to merge over `os.environ` for Slurm's client commands.

        The jobs that the commands submit need it as well.
        """
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        return {"SLURM_CONF": str(self.slurm_conf), "PATH": path}

    @property
    def client_environment(self) -> dict[str, str]:
        """The whole environment for a client command.

        It is this process's environment, without the variables of any other Slurm.
        """
        return _without_slurm(os.environ) | self.env

    @property
    def node_names(self) -> tuple[str, ...]:
        return self._layout.nodes

    @property
    def logs(self) -> Path:
        """The folder of slurmctld.log, slurmd-<node>.log and munged.log.

        Postgres' log is postgres/postgres.log.
        """
        return self._layout.logs

    @property
    def database_url(self) -> str:
        """SQLAlchemy URL of `pollux_daemon`."""
        return self._postgres().url

    # --- life --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the cluster and wait until its nodes are idle.

        Any earlier state in the folder is removed.

        Raises:
            DevClusterError: not root, a program is missing, or a daemon did not come up.
        """
        self._check()
        self._lay_out()
        if self.postgres is not None:
            self.postgres.start()
            store = Store(self.postgres.url, self.cluster_name)
            store.migrate()
            store.close()
        self._write_configuration()
        self._start_munged()
        self._start_accounting()
        self.start_slurmctld()
        if self.postgres is not None:
            self.gateways.start_all(self.postgres, self._daemon_environment())
        for name in self._own_nodes:
            self.start_slurmd(name)
        wait_until(self._all_idle, 90, f"all nodes to be idle; logs are in {self.logs}")
        self._record()

    def stop(self) -> None:
        """End every process of this cluster, jobs included.

        The folder with the logs stays.
        """
        below = descendants(d.pid for d in self._slurmd.values() if d.pid is not None)
        for daemon in self._slurmd.values():
            daemon.send(signal.SIGTERM)
        self.stop_slurmctld()
        for daemon in self._slurmd.values():
            daemon.stop()
        self.gateways.stop_all()
        self._kill_left_overs(below)
        if self._accounting is not None:
            self._accounting.stop()
        if self.munged is not None:
            self.munged.stop()
        if self.postgres is not None:
            self.postgres.stop()
        self._slurmd.clear()
        self.munged = None
        (self.directory / "running.json").unlink(missing_ok=True)

    def start_slurmctld(self) -> None:
        """Start slurmctld from its state on disk; return when it answers."""
        # -i: ignore errors in the state files of a controller that was killed.
        argv = [program("slurmctld"), "-D", "-i", "-f", str(self.slurm_conf)]
        self._slurmctld = Daemon(
            "slurmctld", argv, self.logs / "slurmctld.out", env=self._daemon_environment()
        )
        self._slurmctld.start()
        wait_until(self._controller_answers, 90, f"slurmctld; its log is {self.logs}/slurmctld.log")

    def stop_slurmctld(self, *, kill: bool = False) -> None:
        """Stop slurmctld with TERM, which saves its state, or with KILL.

        KILL is a crash: slurmctld loses the changes of the last seconds. Afterwards a job that had just started is
        pending again with its old restart count, and its processes are killed.
        """
        if self._slurmctld is not None:
            self._slurmctld.stop(signal.SIGKILL if kill else signal.SIGTERM)
            self._slurmctld = None

    def restart_slurmctld(self, *, kill: bool = False) -> None:
        self.stop_slurmctld(kill=kill)
        self.start_slurmctld()

    def signal_slurmctld(self, number: int) -> None:
        """Send a signal to slurmctld.

        STOP makes every client command hang until its own timeout; CONT ends that.
        """
        if self._slurmctld is not None:
            self._slurmctld.send(number)

    def start_slurmd(self, name: str, *, booted: bool = False) -> None:
        """Start the slurmd of a node, which says that the node has just booted, if so."""
        argv = [program("slurmd"), "-D", "-N", name, "-f", str(self.slurm_conf), *(["-b"] if booted else [])]
        daemon = Daemon(
            f"slurmd {name}", argv, self.logs / f"slurmd-{name}.out", env=self._daemon_environment()
        )
        daemon.start()
        self._slurmd[name] = daemon

    def stop_slurmd(self, name: str, *, kill: bool = False) -> None:
        """Stop the slurmd of a node.

        The steps on the node live on, as they do when a real slurmd is restarted.
        """
        self._slurmd.pop(name).stop(signal.SIGKILL if kill else signal.SIGTERM)

    def signal_slurmd(self, name: str, number: int) -> None:
        """Send a signal to the slurmd of a node.

        After STOP, jobs neither start nor end on the node until CONT.
        """
        if name in self._slurmd:
            self._slurmd[name].send(number)

    def stop_postgres(self, *, immediate: bool = False) -> None:
        self._postgres().stop(immediate=immediate)

    def start_postgres(self) -> None:
        self._postgres().start()

    def command(self, *argv: str, timeout_s: float = 60) -> str:
        """Run a Slurm client command against this cluster; return its output.

        Raises:
            DevClusterError: it failed; the message carries its complaint.
        """
        done = subprocess.run(
            argv,
            env=self.client_environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            raise DevClusterError(f"{' '.join(argv)}: exit status {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # Ctrl-C in mid-start too
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- parts of the cluster -------------------------------------------------------------------------------

    def _check(self) -> None:
        if os.geteuid() != 0:
            raise DevClusterError("the private cluster needs root: slurmd runs jobs as their users")
        for name in ("munged", "slurmctld", "slurmd", "scontrol", "sinfo", "sbatch", "srun"):
            program(name)
        if len(str(self._layout.munge_socket)) > _LONGEST_SOCKET_NAME:
            raise DevClusterError(
                f"{self.directory} is too deep: a socket's name has {_LONGEST_SOCKET_NAME} characters"
            )

    def _lay_out(self) -> None:
        layout = self._layout
        for old in (layout.etc, layout.logs, layout.state, layout.devices):
            shutil.rmtree(old, ignore_errors=True)
        if self.postgres is not None:
            shutil.rmtree(self.postgres.directory, ignore_errors=True)
        folders = (
            layout.etc,
            layout.logs,
            layout.state / "slurmctld",
            layout.devices,
            layout.munge_socket.parent,
        )
        for folder in (self.directory, self.hooks.daemon_folder, *folders):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o755)
        os.chown(self.hooks.daemon_folder, self.daemon_user.pw_uid, self.daemon_user.pw_gid)
        for name in layout.nodes:
            (layout.state / name).mkdir(exist_ok=True)
        # GPUs must be character devices: plain files are refused, a bare count makes the node invalid.
        for index in range(layout.gpus_per_node):
            device = layout.devices / f"gpu{index}"
            os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
            device.chmod(0o666)

    def _write_configuration(self) -> None:
        layout = self._layout
        accounting = self._accounting.settings if self._accounting is not None else None
        (layout.etc / "slurm.conf").write_text(slurm_conf(layout, accounting))
        # Without this setting slurmd needs a cgroup filesystem. Slurm before 23 does not know it.
        if slurm_version() >= (23,):
            (layout.etc / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        (layout.etc / "gres.conf").write_text(gres_conf(layout))
        for name, text in layout.site.files.items():
            (layout.etc / name).write_text(text)
        self.hooks.write()

    def _start_munged(self) -> None:
        folder = self._layout.munge_socket.parent
        key = folder / "key"
        key.unlink(missing_ok=True)
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        argv = [
            program("munged"),
            "--foreground",
            "--num-threads=2",
            f"--socket={self._layout.munge_socket}",
        ]
        argv += [f"--key-file={key}", f"--pid-file={folder}/pid", f"--seed-file={folder}/seed"]
        self.munged = Daemon("munged", argv, self.logs / "munged.log", env=self._daemon_environment())
        self.munged.start()
        wait_until(self._munge_ready, 90, "munged")

    def _start_accounting(self) -> None:
        if self._accounting is None:
            return
        environment = self._daemon_environment()
        self._accounting.start(environment)
        self._accounting.manage(environment, "add", "account", "research", "description=research")
        name = self.daemon_user.pw_name
        if name != "root":
            self._accounting.manage(
                environment, "add", "user", name, "account=research", "adminlevel=operator"
            )

    def _munge_ready(self) -> bool:
        assert self.munged is not None
        self.munged.must_run()
        return self._layout.munge_socket.exists()

    def _controller_answers(self) -> bool:
        assert self._slurmctld is not None
        self._slurmctld.must_run()
        ping = ["scontrol", "ping"]
        done = subprocess.run(ping, env=self.client_environment, capture_output=True, text=True, check=False)
        return "is UP" in done.stdout

    def _all_idle(self) -> bool:
        for daemon in self._slurmd.values():
            daemon.must_run()
        names = ",".join(self._own_nodes)
        states = self.command("sinfo", "-h", "-N", "-p", "main", "-n", names, "-o", "%T").split()
        return len(states) == len(self._own_nodes) and set(states) == {"idle"}

    @property
    def _own_nodes(self) -> list[str]:
        """The nodes that are always on."""
        return [name for name in self._layout.nodes if name not in self._layout.site.cloud]

    def _kill_left_overs(self, known: set[int]) -> None:
        """Kill the steps that outlived slurmd, and their processes.

        They outlive slurmd by design.
        """
        deadline = time.monotonic() + 30
        # A dying step may have been about to fork, and on a busy machine a killed process ends later.
        while left := pids_of_cluster(self.slurm_conf) | known:
            known = descendants(left)
            kill_all(left | known)
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def _record(self) -> None:
        """Record the daemons, so that `down` can stop them from another process."""
        facts: dict[str, object] = {"slurm_conf": str(self.slurm_conf), "cluster": self.cluster_name}
        if self.postgres is not None:
            facts |= {"database_url": self.database_url, "postgres_pid": self.postgres.pid}
        record = self.directory / "running.json"
        record.touch(mode=0o600)
        record.write_text(json.dumps(facts, indent=2))

    def _daemon_environment(self) -> dict[str, str]:
        conf = str(self.slurm_conf)
        return _without_slurm(os.environ) | {"SLURM_CONF": conf, MARK: conf}

    def _postgres(self) -> DevPostgres:
        if self.postgres is None:
            raise DevClusterError("this cluster was started without Postgres")
        return self.postgres


def slurm_version() -> tuple[int, ...]:
    """Return the version of the machine's slurmctld, such as (22, 5, 8)."""
    said = subprocess.run([program("slurmctld"), "-V"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", said)
    if found is None:
        raise DevClusterError(f"slurmctld -V: expected a version such as 22.05.8, got {said.strip()!r}")
    return tuple(map(int, found.groups()))


def _without_slurm(environment: os._Environ[str]) -> dict[str, str]:
    prefixes = ("SLURM_", "SBATCH_", "SALLOC_", "SQUEUE_", "SINFO_", "PG")
    return {name: value for name, value in environment.items() if not name.startswith(prefixes)}
