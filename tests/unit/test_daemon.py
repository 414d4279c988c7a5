"""polluxd's process: its lead, its heartbeat, and that no fault ends it.

The tests use a stand-in for the store.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from polluxd.apply.reconciler import Reconciler
from polluxd.config.config_file import Config
from polluxd.config.settings import MoveSettings
from polluxd.cycle.controller import Controller, StepResult
from polluxd.daemon import Daemon
from polluxd.errors import ConfigError, LeaderLost, StoreUnavailable
from polluxd.model import DaemonMode
from polluxd.slurm.fake import FakeSlurm
from tests import build


class LeadingStore:
    """Leads as epoch 1, with a lease that the test sets."""

    def __init__(self, lease_left: float = 15.0, *, leads: bool = True) -> None:
        self.lease_left = lease_left
        self.leads = leads
        self.epoch: int | None = 1
        self.told: list[str] = []

    def still_leading(self) -> bool:
        self.lease_left, self.epoch = (15.0, 1) if self.leads else (0.0, None)
        return self.leads

    def lead(self) -> int | None:
        return self.epoch

    def tell(self, trouble: str) -> None:
        self.told.append(trouble)

    def check_schema(self) -> None: ...

    def prune(self, now: float, **kept: float) -> None: ...


def config(folder: Path) -> Config:
    return build.config("enforce", slurm={"heartbeat_file": str(folder / "heartbeat"), "timeout_s": 10.0})


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    made = Daemon(lambda: config(tmp_path))
    made.store.close()
    made.store = LeadingStore()  # type: ignore[assignment]
    made.controller = SimpleNamespace(step=lambda: StepResult(0, True, False, gpus=16))  # type: ignore[assignment]
    return made


def test_slurmctld_can_read_the_heartbeat_whatever_the_umask(daemon: Daemon, tmp_path: Path) -> None:
    before = os.umask(0o027)  # the unit's
    try:
        daemon.turn()
    finally:
        os.umask(before)
    heartbeat = tmp_path / "heartbeat"
    assert stat.S_IMODE(heartbeat.stat().st_mode) == 0o644
    assert heartbeat.read_text().splitlines()[1] == "16", "GPUs of the cluster, for the submission hook"


def test_a_polluxd_that_only_observes_touches_a_heartbeat_of_its_own(tmp_path: Path) -> None:
    made = Daemon(lambda: config(tmp_path).model_copy(update={"mode": DaemonMode.OBSERVE}))
    made.store.close()
    made.store = LeadingStore()  # type: ignore[assignment]
    made.controller = SimpleNamespace(step=lambda: StepResult(0, True, False))  # type: ignore[assignment]
    made.turn()
    assert [path.name for path in tmp_path.glob("heartbeat*")] == ["heartbeat.observe"]


def test_status_is_told_why_a_leader_takes_no_action(daemon: Daemon) -> None:
    sound = daemon.controller.step

    def full() -> StepResult:
        raise StoreUnavailable("could not extend file: No space left on device")

    for step in (sound, full, full, sound):
        daemon.controller.step = step  # type: ignore[method-assign]
        daemon.turn()
    assert daemon.store.told == ["", "database_error", "database_error", ""]  # type: ignore[attr-defined]


def test_a_heartbeat_that_cannot_be_written_is_said_once(
    daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "heartbeat").mkdir()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            daemon.turn()
    said = [record.message for record in caplog.records]
    assert len(said) == 1
    assert "could not be written" in said[0]


def test_a_full_disk_is_said_once_leaves_nothing_behind_and_is_got_over(
    daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.turn()
    before = (tmp_path / "heartbeat").read_text()
    real = Path.write_text

    def full(path: Path, text: str) -> int:
        real(path, "")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with caplog.at_level(logging.INFO), monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        for _ in range(3):
            daemon.turn()
    assert [record.message for record in caplog.records if "No space left" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1
    # Old by and by, so that the hook lets new jobs start as plain ones.
    assert (tmp_path / "heartbeat").read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["heartbeat"]
    daemon.turn()
    assert daemon.trouble == ""


def test_a_lease_that_runs_short_is_prolonged_and_one_that_ended_is_not(daemon: Daemon) -> None:
    daemon.store = LeadingStore(lease_left=4.0)  # type: ignore[assignment]
    assert daemon.authorize() == 1
    daemon.store = LeadingStore(lease_left=0.0)  # type: ignore[assignment]
    with pytest.raises(LeaderLost, match="ends in 0 s"):
        daemon.authorize()
    daemon.store = LeadingStore(lease_left=4.0, leads=False)  # type: ignore[assignment]
    with pytest.raises(LeaderLost):
        daemon.authorize()


def test_systemd_hears_of_it_before_each_call_however_many_a_tick_makes(daemon: Daemon) -> None:
    told: list[str] = []
    daemon.notifier = SimpleNamespace(notify=told.append)  # type: ignore[assignment]
    for _ in range(3):
        daemon.authorize()
    assert told == ["WATCHDOG=1"] * 3


def test_the_lead_is_confirmed_after_slurm_answered(tmp_path: Path) -> None:
    """polluxd confirms its lead again after Slurm has answered.

    In an earlier version Slurm's answers took some seconds. The lead's lease was then over before the first move, and
    polluxd never moved a job.
    """
    store = LeadingStore(leads=False)
    slurm, leading = FakeSlurm([]), cast(Any, store)
    acting = Reconciler(slurm, leading, limits=MoveSettings(), lease=60.0, authorize=lambda: 1)
    controller = Controller(config(tmp_path), slurm, leading, acting)
    with pytest.raises(LeaderLost, match="while Slurm answered"):
        controller.step()


def test_faults_of_its_own_do_not_end_it(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("unforeseen")

    daemon.store.prune = broken  # type: ignore[method-assign]
    daemon.turn()
    daemon.store.wait = broken  # type: ignore[method-assign]
    daemon.wait(0.0)
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


def test_a_reload_that_fails_leaves_the_old_store_open(tmp_path: Path) -> None:
    answers = [config(tmp_path)]

    def load() -> Config:
        if not answers:
            raise ConfigError("not TOML")
        return answers.pop()

    daemon = Daemon(load)
    store = daemon.store
    daemon.reread()
    assert daemon.store is store
    answers.append(config(tmp_path))
    daemon.reread()
    assert daemon.store is not store
    daemon.store.close()


def test_under_the_unit_its_libraries_start_no_thread_per_core() -> None:
    """polluxd's libraries stay below the unit's TasksMax on many cores.

    OpenBLAS starts one thread for each core, twice (for numpy and for scipy). On a large controller these are more
    threads than TasksMax allows.
    """
    root = Path(__file__).parents[2]
    lines = (root / "contrib" / "systemd" / "polluxd.service").read_text().splitlines()
    given = [line.removeprefix("Environment=") for line in lines if line.startswith("Environment=")]
    bare = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    asked = bare | dict(word.split("=") for line in given for word in line.split())
    count = "import os, polluxd.policy, scipy.optimize; print(len(os.listdir('/proc/self/task')))"
    told = [
        subprocess.run(
            [sys.executable, "-c", count], env=e, capture_output=True, text=True, check=True
        ).stdout
        for e in (asked, bare)
    ]
    assert int(told[0]) == 1
    assert int(told[1]) > 1 or os.cpu_count() == 1
