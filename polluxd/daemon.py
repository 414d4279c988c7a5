"""Process life of polluxd: signals, reload, leadership, systemd.

The cycle itself is in `cycle`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import FrameType

import sdnotify

from polluxd import logs
from polluxd.apply.reconciler import Reconciler
from polluxd.config.config_file import Config
from polluxd.cycle.controller import Controller, StepResult
from polluxd.errors import ConfigError, LeaderLost, PolluxError, SlurmError, StoreError
from polluxd.metrics import Metrics, timed_slurm
from polluxd.metrics.endpoint import Endpoint
from polluxd.model import DaemonMode
from polluxd.slurm.pyslurm_client import open_client
from polluxd.store import Store
from polluxd.store.views import TROUBLES

log = logging.getLogger(__name__)

_STANDBY_S = 2.0
"""Pause between attempts to take the lead, or to reach a database or Slurm that is down."""

_PRUNE_EVERY_S = 3600.0
_SNAPSHOTS_S = 86400.0
"""Snapshots are large (every job and node of a cycle): a day of them can be replayed."""


class Daemon:
    """Runs the cycle until told to stop.

    SIGTERM and SIGINT end it after the action in hand (a second one changes nothing: moves under way are in the
    database, and the next polluxd finishes them). SIGHUP reads the configuration again; a faulty one is refused and
    the old one stays in force. `load` returns the configuration and is called at the start and at each reload.
    """

    def __init__(self, load: Callable[[], Config]) -> None:
        self._load = load
        self._stopping = threading.Event()
        self._reload = threading.Event()
        self.notifier = sdnotify.SystemdNotifier()
        self.trouble = ""
        self._pruned = float("-inf")
        self.metrics = Metrics(version("polluxd"))
        self.endpoint = Endpoint(self.metrics.registry)
        self._unserved = ""
        self._moving = False
        self._assemble(load())

    def _assemble(self, config: Config) -> None:
        """Wire the rooms together for `config`."""
        self._config = config
        logs.use(config.log.format)
        client = open_client(config.slurm.client, conf=config.slurm.conf, timeout=config.slurm.timeout_s)
        slurm = timed_slurm(client, self.metrics)
        database, lease_s = config.database, config.cycle.leader_lease_s
        self.store = Store(database.url, config.slurm.cluster, **database.waits, lease_s=lease_s)
        self.store.watch_failures(self.metrics.database_failed)
        self._schema_known = False
        reconciler = Reconciler(
            slurm,
            self.store,
            limits=config.moves,
            lease=config.slurm.lease_s,
            authorize=self.authorize,
            ended=lambda move, result, seconds: self.metrics.move_over(move.path, result, seconds),
        )
        self.controller = Controller(config, slurm, self.store, reconciler, metrics=self.metrics)

    def run(self) -> None:
        """Loop until SIGTERM or SIGINT, whatever Slurm and Postgres do."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGHUP, self._on_reload)
        log.info("polluxd started: mode %s, cluster %s", self._config.mode, self._config.slurm.cluster)
        self.notifier.notify("READY=1")
        while not self._stopping.is_set():
            if self._reload.is_set():
                self.reread()
            self.serve_metrics()
            pause = self.turn()
            self.notifier.notify("WATCHDOG=1")
            if not self._stopping.is_set():
                self.wait(pause)
        self.notifier.notify("STOPPING=1")
        self.endpoint.close()
        self.store.close()
        log.info(
            "polluxd stopped; the database keeps the moves under way, and the next polluxd finishes them"
        )

    def wait(self, pause: float) -> None:
        try:
            self.store.wait(pause, for_news=self._moving)
        except Exception:
            log.exception("a fault in polluxd itself: it cannot wait for news of moves, and polls instead")
            self._stopping.wait(pause)

    def turn(self) -> float:
        """One turn of the loop; returns the seconds to wait before the next."""
        result, pause = self._turn()
        self.store.tell(result if result in TROUBLES else "")
        self.metrics.cycle_over(result, leads=self.store.lease_left > 0)
        return pause

    def serve_metrics(self) -> None:
        """Serve metrics where the configuration says; while the address is taken, each turn tries again."""
        try:
            self.endpoint.listen(self._config.metrics.listen)
            self._unserved = ""
        except ConfigError as error:
            if str(error) != self._unserved:
                log.warning("no metrics: %s, or set it to an empty text", error)
            self._unserved = str(error)

    def _turn(self) -> tuple[str, float]:
        """Return one of `CYCLE_RESULTS`, and the pause after the turn [s]."""
        self._moving = False
        try:
            if not self._schema_known:
                self.store.check_schema()
                self._schema_known = True
            if self.store.lead() is None:
                self._warn_once("standby: another polluxd leads")
                return "standby", _STANDBY_S
            result = self.controller.step()
            sound = self._beat(result)
            if self._forget_history() and sound:
                self._recovered(result)
        except LeaderLost as error:
            self._warn_once(f"polluxd is not acting: {error}")
            return "lead_lost", _STANDBY_S
        except (SlurmError, StoreError) as error:
            self._warn_once(
                f"polluxd takes no action and leaves running jobs alone: {type(error).__name__}: {error}"
            )
            return "slurm_error" if isinstance(error, SlurmError) else "database_error", _STANDBY_S
        except PolluxError as error:
            self._warn_once(f"polluxd takes no action: {error}")
            return "refused", _STANDBY_S
        except Exception:
            # A fault of ours must not take the daemon down, nor be hidden; the jobs run on either way.
            log.exception(
                "a fault in polluxd itself: it took no action in this cycle; report the traceback below"
            )
            self.notifier.notify("STATUS=a fault in polluxd itself; see the log")
            return "fault", _STANDBY_S
        self._moving = result.open_moves > 0
        pause = self._config.cycle.busy_poll_s if self._moving else self._config.cycle.poll_s
        return "decided" if result.decided else "polled", pause

    def authorize(self) -> int:
        """Return the epoch to act under.

        Raises LeaderLost if the lead may end before a call to Slurm would.

        Slurm knows no fence: a leader that was stalled for minutes must find out before its next call, without
        asking anybody. A lease that has not ended is prolonged, so that many moves in one tick end no lead.
        """
        # A tick may make many slow calls; the service is alive.
        self.notifier.notify("WATCHDOG=1")
        if 0 < self.store.lease_left <= self._config.slurm.timeout_s:
            self.store.still_leading()
        epoch, left = self.store.epoch, self.store.lease_left
        if epoch is None or left <= self._config.slurm.timeout_s:
            raise LeaderLost(
                f"the lead ends in {left:.0f} s, and a call to Slurm may take {self._config.slurm.timeout_s:.0f} s"
            )
        return epoch

    def _warn_once(self, trouble: str) -> None:
        """Log a trouble once, not at every turn."""
        if trouble != self.trouble:
            log.warning("%s", trouble)
            self.notifier.notify(f"STATUS={trouble}")
            self.trouble = trouble

    def _recovered(self, result: StepResult) -> None:
        status = "paused" if result.paused else f"{self._config.mode}, {result.open_moves} moves under way"
        self.notifier.notify(f"STATUS={status}")
        if self.trouble:
            log.info("recovered: %s", status)
            self.trouble = ""

    def _beat(self, result: StepResult) -> bool:
        """Touch the heartbeat file that the submission hook looks at."""
        path = self._config.slurm.heartbeat_file
        if path is None or result.paused:
            return True
        if self._config.mode is not DaemonMode.ENFORCE:
            # The hook then keeps no job back, and has the agents change nothing either.
            path = path.with_name(f"{path.name}.observe")
        try:
            _write_atomically(path, f"{time.time():.0f}\n{result.gpus}\n")
        except OSError as error:
            # The hook then lets new jobs start as plain Slurm jobs: the safe side.
            self._warn_once(
                f"the heartbeat {path} could not be written ({error.strerror}); new jobs start as plain Slurm jobs "
                "until it can: check its folder and the disk"
            )
            return False
        return True

    def _forget_history(self) -> bool:
        """Prune old history; log a failure and try again at the next turn."""
        if time.monotonic() - self._pruned < _PRUNE_EVERY_S:
            return True
        kept = self._config.database.history_days * 86400.0
        try:
            self.store.prune(time.time(), history_s=kept, snapshots_s=min(kept, _SNAPSHOTS_S), jobs_s=kept)
            self._pruned = time.monotonic()
        except StoreError as error:
            self._warn_once(f"polluxd could not remove old history, and tries again: {error}")
            return False
        return True

    def reread(self) -> None:
        self._reload.clear()
        try:
            config = self._load()
        except ConfigError as error:
            log.error("polluxd refused the new configuration and keeps the old one: %s", error)
            return
        before = self.store
        self._assemble(config)  # first: a signal may come at any moment and rings the store's bell
        before.close()
        log.info("polluxd read its configuration again: mode %s", config.mode)

    def _on_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping.set()
        self.store.wake()

    def _on_reload(self, _number: int, _frame: FrameType | None) -> None:
        self._reload.set()
        self.store.wake()


def _write_atomically(path: Path, text: str) -> None:
    """Replace the file by one that everybody may read: slurmctld runs as another user; the unit's umask is 0027."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # on a full disk even an empty file is one too many
        raise
