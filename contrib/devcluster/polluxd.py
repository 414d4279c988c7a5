"""polluxd on a private cluster, as a process of its own: for demo, tests and trials.

Its owner kills it, freezes it and starts it again. Everything is quicker than the defaults of polluxd(8).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from polluxd.apply.idle_watch import PREFIX as IDLE
from polluxd.model import RESTARTING_PATHS, Move, Step
from polluxd.store import Store

from .cluster import DevCluster
from .configuration import write_configuration
from .errors import DevClusterError
from .processes import Daemon, wait_until

BIN = Path(sys.executable).parent

PACE: Mapping[str, Mapping[str, object]] = {
    "slurm": {"timeout_s": 5, "lease_s": 60},
    "cycle": {"interval_s": 5, "floor_s": 1, "poll_s": 0.5, "busy_poll_s": 0.25, "leader_lease_s": 8},
    "moves": {"cooldown_s": 5, "default_cost_s": 5, "drain_timeout_s": 60, "training_timeout_s": 120},
    "policy": {},
}
"""On two busy cores, by section of polluxd.toml."""


class Polluxd(Daemon):
    """`polluxd run`, by the account that the cluster has for it.

    Several of them may share a folder, and so a configuration.

    Args:
        name: of its log.
        sections: keys of polluxd.toml, over those of `PACE`.
    """

    grace_s = 90.0

    def __init__(
        self, cluster: DevCluster, folder: Path, name: str = "polluxd", **sections: Mapping[str, object]
    ) -> None:
        self.config = folder / "polluxd.toml"
        account = cluster.daemon_user
        super().__init__(
            name,
            [str(BIN / "polluxd"), "run", "--config", str(self.config)],
            folder / f"{name}.log",
            env={**cluster.client_environment, "POLLUXD_CONFIG": str(self.config), "NO_COLOR": "1"},
            user=account.pw_name if account.pw_uid else None,
        )
        chosen = {section: {**pace, **sections.get(section, {})} for section, pace in PACE.items()}
        write_configuration(cluster, self.config, **chosen)

    def explain(self, job_id: int) -> str:
        """What polluxctl tells of a job, on one line."""
        return " ".join(self.command("polluxctl", "explain", str(job_id)).stdout.split())

    def explained(self, store: Store, job_id: int, words: str, seconds: float = 120.0) -> str:
        """Wait until the newest decision's reason for a job has these words; return what polluxctl then tells.

        Raises:
            DevClusterError: no decision gave this reason, or polluxctl does not tell it.
        """

        def decided() -> bool:
            found = store.explain(job_id)
            return found is not None and found.allocation is not None and words in found.allocation.reason

        # polluxctl itself takes most of a second of CPU time.
        wait_until(decided, seconds, f"a reason of job {job_id} that has {words!r}", every_s=0.3)
        told = self.explain(job_id)
        if words not in told:
            raise DevClusterError(f"polluxctl does not tell {words!r}: {told}")
        return told

    def command(self, program: str, *words: str, columns: int = 200) -> subprocess.CompletedProcess[str]:
        """Run a command of polluxd or polluxctl by the same account."""
        return subprocess.run(
            [str(BIN / program), *words],
            env={**self.env, "COLUMNS": str(columns)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            cwd="/",
            **self.identity,  # type: ignore[call-overload]
        )


def idle_notes(store: Store, since: float) -> list[str]:
    """Return what polluxd's own watch has said since a POSIX time of GPUs that idled beside a waiting job."""
    return [cycle.note for cycle in store.cycles_between(since, time.time()) if IDLE in cycle.note]


def lost_gpu_s(moves: Iterable[Move], since: float = 0.0) -> float:
    """Return the GPU seconds for which running trainings stood because of moves that came to nothing.

    A training stands from its last step until it has GPUs again, by this move or a later one of its job.
    A job that never has them again counts until the end of the move.

    Args:
        moves: oldest first.
        since: moves that were planned earlier do not count [POSIX s].
    """
    lost, known = 0.0, list(moves)
    for number, move in enumerate(known):
        stood = move.times.get(Step.CHECKPOINTED, move.times.get(Step.REQUEUED))
        vain = move.step is Step.FAILED and move.path in RESTARTING_PATHS
        if not vain or stood is None or move.times[Step.PLANNED] < since:
            continue
        later = (one for one in known[number:] if one.job_id == move.job_id and Step.STARTED in one.times)
        back = next((one.times[Step.STARTED] for one in later), move.times.get(Step.FAILED, stood))
        lost += move.source.gpus * max(0.0, back - stood)
    return round(lost, 1)
