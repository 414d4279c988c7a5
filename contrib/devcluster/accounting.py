"""A private slurmdbd and its MariaDB.

They give Slurm its users, their rights and a record of its jobs.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import subprocess

from .errors import DevClusterError
from .processes import Daemon, free_ports, program, wait_until
from .slurmconf import Accounting, Layout, slurmdbd_conf

_SERVER = ("--no-defaults", "--user=root")


class DevAccounting:
    """MariaDB and slurmdbd in `layout.directory`/accounting, both on loopback.

    slurmdbd must answer, and know the cluster, before slurmctld starts: `start` sees to it. Like the private
    Postgres it is for tests and demos: nothing in it is synced to disk.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._directory = layout.directory / "accounting"
        slurmdbd_port, mariadb_port = free_ports(2)
        self.settings = Accounting(slurmdbd_port, mariadb_port, secrets.token_hex(12))
        self._mariadb: Daemon | None = None
        self._slurmdbd: Daemon | None = None

    def start(self, environment: dict[str, str]) -> None:
        """Set up and start slurmdbd, with the cluster registered in it.

        munged must run already, and slurmctld must not run yet.

        Args:
            environment: of Slurm's daemons and commands.

        Raises:
            DevClusterError: a program is missing, or did not come up.
        """
        self._start_mariadb(environment)
        conf = self._layout.etc / "slurmdbd.conf"
        conf.touch(mode=0o600)  # slurmdbd refuses a file that others may read
        conf.write_text(slurmdbd_conf(self._layout, self.settings))
        self._slurmdbd = Daemon(
            "slurmdbd", [program("slurmdbd"), "-D"], self._layout.logs / "slurmdbd.out", env=environment
        )
        self._slurmdbd.start()
        wait_until(
            lambda: self._answers(environment), 90, f"slurmdbd; its log is {self._layout.logs}/slurmdbd.log"
        )
        self.manage(environment, "add", "cluster", self._layout.cluster_name)

    def manage(self, environment: dict[str, str], *words: str) -> None:
        """Run one `sacctmgr` command without its questions.

        Raises:
            DevClusterError: the command failed; the message carries its complaint.
        """
        done = subprocess.run(
            [program("sacctmgr"), "-i", *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise DevClusterError(f"sacctmgr {' '.join(words)}: {(done.stderr or done.stdout).strip()}")

    def stop(self) -> None:
        if self._slurmdbd is not None:
            self._slurmdbd.stop()
        if self._mariadb is not None:
            self._mariadb.stop(signal.SIGTERM, grace_s=15)
        self._slurmdbd = self._mariadb = None

    def _start_mariadb(self, environment: dict[str, str]) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True, mode=0o700)
        data, temporary = self._directory / "data", self._directory / "tmp"
        temporary.mkdir()  # each server that starts removes the temporary tables of others in a folder that they share
        done = subprocess.run(
            [
                program("mariadb-install-db"),
                *_SERVER,
                f"--datadir={data}",
                f"--tmpdir={temporary}",
                "--skip-test-db",
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise DevClusterError(f"mariadb-install-db failed in {data}: {done.stderr.strip()}")
        first = self._directory / "first.sql"
        first.touch(mode=0o600)
        first.write_text(
            f"CREATE USER slurm@'127.0.0.1' IDENTIFIED BY '{self.settings.password}';\n"
            "GRANT ALL ON slurm_acct_db.* TO slurm@'127.0.0.1';\n"
        )
        options = {
            "datadir": data,
            "tmpdir": temporary,
            "socket": self._directory / "socket",
            "pid-file": self._directory / "pid",
            "init-file": first,
            "bind-address": "127.0.0.1",
            "port": self.settings.mariadb_port,
            "skip-name-resolve": "ON",
            # slurmdbd warns below these; none of it needs to outlive a crash.
            "innodb-buffer-pool-size": "64M",
            "innodb-lock-wait-timeout": 900,
            "innodb-flush-log-at-trx-commit": 0,
        }
        argv = [program("mariadbd"), *_SERVER, *(f"--{name}={value}" for name, value in options.items())]
        log = self._layout.logs / "mariadb.log"
        # The mark in the environment says that it is part of this cluster, so that `down` can find it.
        self._mariadb = Daemon("mariadbd", argv, log, env=environment)
        self._mariadb.start()
        wait_until(self._accepts, 90, f"MariaDB; its log is {log}")

    def _accepts(self) -> bool:
        assert self._mariadb is not None
        self._mariadb.must_run()
        return (self._directory / "socket").exists()

    def _answers(self, environment: dict[str, str]) -> bool:
        assert self._slurmdbd is not None
        self._slurmdbd.must_run()
        ask = [program("sacctmgr"), "-n", "show", "cluster"]
        try:
            # While slurmdbd starts, it may refuse a question and leave the asker waiting.
            done = subprocess.run(ask, env=environment, capture_output=True, check=False, timeout=10)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0
