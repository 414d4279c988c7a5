"""A private cluster for one run of the suite, with its users."""

from __future__ import annotations

import contextlib
import fcntl
import pwd
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from contrib.attack.site import USERS, Site
from contrib.devcluster import DevCluster, Polluxd, SiteLines
from contrib.devcluster.power_saving import PowerSaving
from contrib.devcluster.processes import program

_USED = Path("/run/lock/pollux-attack")


@contextmanager
def users() -> Iterator[None]:
    """Create the users that do not exist; the last of several runs on this machine removes them."""
    with _USED.open("a") as used:
        fcntl.flock(used, fcntl.LOCK_SH)
        for name in USERS:
            try:
                pwd.getpwnam(name)
            except KeyError:
                subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/sh", name], check=True)
        try:
            yield
        finally:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for name in USERS:
                    subprocess.run(["userdel", name], check=False, capture_output=True)


@contextmanager
def site(
    nodes: int = 8, gpus_per_node: int = 1, interval_s: float = 4.0, settings: Sequence[str] = ()
) -> Iterator[Site]:
    """Start a new cluster with polluxd, and remove it afterwards.

    Args:
        interval_s: between two decisions of polluxd.
        settings: arguments of `polluxctl settings set`. With any, all nodes but the first are off until Slurm boots
            them, and have the feature `rented`.
    """
    with tempfile.TemporaryDirectory(prefix="pollux-attack-") as name, users():
        folder = Path(name)
        folder.chmod(0o755)
        scripts = folder / "scripts"
        scripts.mkdir()
        power = PowerSaving(folder / "power", boot_s=2.0, fails_every=0, idle_s=8) if settings else None
        rented = tuple(f"n{number}" for number in range(2, nodes + 1)) if settings else ()
        lines = SiteLines(
            power.lines if power else (), nodes=dict.fromkeys(rented, "Feature=rented"), cloud=rented
        )
        made = DevCluster(
            folder / "cluster",
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            lease_s=60,
            publish_interval_s=1.0,
            site=lines,
        )
        if power is not None:
            power.programs(made.slurm_conf, program("slurmd"))  # slurmctld looks for them when it starts
        with made as cluster:
            pace = {"cycle": {"interval_s": interval_s, "poll_s": 1}}
            polluxd = Polluxd(cluster, folder, **pace, moves={"cooldown_s": 1, "training_timeout_s": 150})
            place = Site(cluster, scripts, polluxd, nodes * gpus_per_node, interval_s)
            place.power = power
            if settings:
                polluxd.command("polluxctl", "settings", "set", *settings).check_returncode()
            try:
                place.gateway.restart()
                polluxd.start()
                place.until(place.cycles, "the first cycle of polluxd", 120.0)
                yield place
                place.clear()
            finally:
                polluxd.stop()
                place.store.close()
