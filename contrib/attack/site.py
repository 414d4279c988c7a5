"""A private cluster with polluxd, and what three users do on it."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psycopg2

from contrib.attack.answers import Answer, Request, Result, answers
from contrib.attack.daemon import GatewayService, Polluxd
from contrib.attack.report import report
from contrib.devcluster import DevCluster
from contrib.devcluster.power_saving import PowerSaving
from polluxd.errors import LeaderLost, StoreRejected
from polluxd.model import Move, Node, Placement
from polluxd.slurm.protocol import SlurmClient, SlurmJob
from polluxd.slurm.pyslurm_client import open_client
from polluxd.store import Store

ROOT = Path(__file__).resolve().parents[2]
USERS = ("pollux-alice", "pollux-mallory", "pollux-third")
"""Alice is honest, mallory is not, and the third user has no jobs."""

_NAME_UNSEEN = """
local submit = slurm_job_submit
slurm_job_submit = function(job, ...)
  local name = job.name
  job.name = "unseen"
  local answer = submit(job, ...)
  job.name = name
  return answer
end
"""


def slowness() -> float:
    """Return how much longer all may take than on a quiet machine, by its load: 1 to 4."""
    return min(4.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


class Site:
    """The cluster, its users and what each of them may do.

    Args:
        folder: of scripts; every user may read it.
        gpus: of the whole cluster.
    """

    def __init__(
        self, cluster: DevCluster, folder: Path, polluxd: Polluxd, gateway: GatewayService, gpus: int
    ) -> None:
        self.cluster = cluster
        self.folder = folder
        self.polluxd = polluxd
        self.gateway = gateway
        self.gpus = gpus
        self.power: PowerSaving | None = None
        """Of the rented nodes, where there are any."""
        self.slurm: SlurmClient = open_client("auto", conf=cluster.slurm_conf, timeout=20)
        self.store = Store(cluster.database_url, cluster.cluster_name)
        self._submitted: list[int] = []
        self._spawned: list[subprocess.Popen[str]] = []
        self._residents: dict[str, int] = {}
        self._tokens: dict[tuple[str, int, int], str] = {}
        self.residents_training: Any = None

    # --- what users do ---------------------------------------------------------------------------

    def words(self, user: str, **environment: str) -> dict[str, Any]:
        """Return the arguments with which subprocess runs a command as a user."""
        entry = pwd.getpwnam(f"pollux-{user}")
        return {
            "env": {**self.cluster.client_environment, "HOME": "/", "USER": entry.pw_name, **environment},
            "cwd": "/",
            "text": True,
            "errors": "replace",
            "stdin": subprocess.DEVNULL,
            "user": entry.pw_uid,
            "group": entry.pw_gid,
            "extra_groups": [],
        }

    def run(
        self, user: str, *argv: str, timeout_s: float = 60.0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as one of the users ("alice", "mallory", "third")."""
        words = self.words(user, **environment)
        return subprocess.run(argv, capture_output=True, timeout=timeout_s * slowness(), check=False, **words)

    def spawn(self, user: str, *argv: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command as a user; `clear` ends it."""
        sink = (self.folder / f"spawned-{len(self._spawned)}-{user}.log").open("w")
        words = self.words(user, **environment)
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=sink, start_new_session=True, **words)
        sink.close()
        self._spawned.append(process)
        return process

    def hands(self, user: str, *words: object, timeout_s: float = 60.0, may_fail: bool = False) -> str:
        """Run a function of `contrib.attack.hands` as a user; return its output.

        Raises RuntimeError where it breaks, unless it `may_fail`: its last error then stands for its output.
        """
        done = self.run(user, *self.command(*words), timeout_s=timeout_s)
        if done.returncode and not may_fail:
            raise RuntimeError(f"{words[:2]}: {done.stderr[-400:]}")
        return done.stdout if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2]

    @staticmethod
    def command(program: object, *words: object) -> tuple[str, ...]:
        """Return the command of a function of the hands; lists and mappings become JSON."""
        said = (json.dumps(word) if isinstance(word, list | dict) else str(word) for word in words)
        return (sys.executable, "-m", f"contrib.attack.hands.{program}", *said)

    def sql(self, user: str, logins: Sequence[str], *statements: str, **options: Any) -> list[Result]:
        """Log in to Postgres, and run statements there.

        Each login has a result, too.
        """
        order = {"logins": list(logins), "statements": statements, **options}
        said = self.hands(user, "sql", "ask", order)
        return [Result(**json.loads(line)) for line in said.splitlines()]

    def order(self, *requests: Request, **words: Any) -> dict[str, Any]:
        """Return an order for the hand that asks the gateway."""
        return {"url": self.gateway.url, "requests": requests, **words}

    def ask(self, user: str, *requests: Request, **words: Any) -> list[Answer]:
        """Ask the gateway; `words` as in `contrib.attack.hands.gateway`."""
        said = self.hands(user, "gateway", "ask", self.order(*requests, **words), timeout_s=120.0)
        return answers(said.splitlines())

    @staticmethod
    def payload(job_id: int, attempt: int = 0) -> dict[str, Any]:
        """Return what a job's process puts into a munge credential."""
        nonce = secrets.token_hex(16)
        return {"purpose": "attempt", "cluster": "", "job": job_id, "attempt": attempt, "nonce": nonce}

    @staticmethod
    def question() -> dict[str, Any]:
        """Return what polluxctl puts into a munge credential."""
        return {"purpose": "user", "nonce": secrets.token_hex(16)}

    def token(self, user: str, job_id: int | None = None, attempt: int = 0) -> str:
        """Return the token of a job of the user's; without one, of the resident's."""
        job_id = self.resident(user) if job_id is None else job_id
        key = (user, job_id, attempt)
        if key not in self._tokens:
            (answer,) = self.ask(user, payload=self.payload(job_id, attempt))
            if not answer.ok:
                raise RuntimeError(f"no token for {user}'s job {job_id}: {answer.text}")
            self._tokens[key] = answer.document["token"]
        return self._tokens[key]

    def publish(self, user: str, job_id: int | None = None, attempt: int = 0, **changes: Any) -> Answer:
        """Publish a report as the user's agent does."""
        token = self.token(user, job_id, attempt)
        return self.ask(user, ("POST", "/v1/report", report(**changes)), token=token)[0]

    def reported(self, user: str, job_id: int, attempt: int = 0, **changes: Any) -> None:
        """Wait until a report of the job is accepted."""

        def accepted() -> bool:
            with contextlib.suppress(RuntimeError):
                return self.publish(user, job_id, attempt, **changes).ok
            return False

        self.until(accepted, f"a report of {user}'s job {job_id}, attempt {attempt}", 90.0)

    def uid(self, user: str) -> int:
        return pwd.getpwnam(f"pollux-{user}").pw_uid

    def home(self, user: str) -> Path:
        """Return a folder that only the user may enter."""
        path = self.folder / f"home-{user}"
        if not path.exists():
            path.mkdir(mode=0o700)
            os.chown(path, self.uid(user), pwd.getpwnam(f"pollux-{user}").pw_gid)
        return path

    # --- jobs ------------------------------------------------------------------------------------

    def script(self, name: str, *lines: str) -> Path:
        """Write a batch script that runs `lines` and then sleeps."""
        path = self.folder / name
        path.write_text("\n".join(("#!/bin/sh", *lines, "sleep 3600")) + "\n")
        path.chmod(0o755)
        return path

    def sbatch(self, user: str, script: Path, *options: str) -> tuple[int | None, str]:
        """Submit a script; return the job's id, or None and sbatch's complaint."""
        done = self.run(user, "sbatch", "--parsable", "--output=/dev/null", *options, str(script))
        if done.returncode:
            return None, " ".join(done.stderr.split())
        self._submitted.append(int(done.stdout))
        return int(done.stdout), ""

    def submitted(self, job_id: int) -> None:
        """Have `clear` end a job."""
        self._submitted.append(job_id)

    def pollux_job(self, user: str, directive: str = "max-gpus=1", *options: str) -> int:
        """Submit a Pollux job that sleeps; return its id once it holds GPUs."""
        script = self.script(f"pollux-{user}.sh", f"#POLLUX {directive}")
        job_id, trouble = self.sbatch(user, script, "--gres=gpu:1", "--open-mode=append", *options)
        if job_id is None:
            raise RuntimeError(trouble)
        self.until(lambda: self.started(job_id), f"the start of job {job_id}", 60.0)
        return job_id

    def started(self, job_id: int, attempt: int = 0) -> bool:
        """Say whether polluxd has recorded the start of an attempt."""
        asked = (
            "SELECT 1 FROM pollux.job WHERE job_id = %s AND attempt = %s AND gpus > 0 AND ended_at IS NULL"
        )
        return bool(self.query(asked, job_id, attempt))

    def resident(self, user: str) -> int:
        """Return the user's Pollux job that runs during the whole suite."""
        if user not in self._residents:
            self._residents[user] = self.pollux_job(user)
            self._submitted.remove(self._residents[user])
            self.reported(user, self._residents[user])
        return self._residents[user]

    def job(self, job_id: int) -> SlurmJob | None:
        """Return the job as polluxd reads it."""
        return self.slurm.jobs([job_id]).get(job_id)

    def cycles(self) -> int:
        """Return the number of polluxd's newest decision."""
        return int(self.query("SELECT coalesce(max(id), 0) FROM pollux.cycle")[0][0])

    @staticmethod
    def places(*nodes: Sequence[str]) -> tuple[Placement, ...]:
        """Return placements on these nodes, with one GPU on each."""
        return tuple(Placement(tuple(each), 1) for each in nodes)

    def plan(self, job_id: int, source: Placement, target: Placement, path: str = "resize") -> Move:
        """Have polluxd move a job in its first attempt."""
        planned: list[Move] = []

        def planning() -> bool:
            leader = self.store.leader()
            if leader is None:
                return False
            words = (job_id, 0, path, source, target, "by the attack suite", leader.epoch)
            try:
                planned.append(self.store.plan_move(*words))
            except (StoreRejected, LeaderLost):
                return False
            return True

        self.until(planning, "a resize to be planned", 60.0)
        return planned[0]

    def drained(self, user: str, job_id: int, **facts: float) -> Move:
        """Have polluxd move a job in its first attempt to another node.

        Acknowledges as its agent does. Raises RuntimeError, TimeoutError: the move did not go on.

        Args:
            facts: of the acknowledgement.
        """
        job = self.job(job_id)
        assert job is not None
        move = self.plan(job_id, *self.places(job.nodes, self.free_nodes()[:1]), path="requeue")
        token = self.token(user, job_id)

        def ordered() -> bool:
            (answer,) = self.ask(user, ("GET", "/v1/orders?seen=", None), token=token)
            return bool(answer.ok and answer.document["drain"] == move.id)

        self.until(ordered, "the order to drain", 40.0)
        (answer,) = self.ask(user, ("POST", "/v1/acknowledgements", {"move": move.id, **facts}), token=token)
        if not answer.ok or not answer.document["accepted"]:
            raise RuntimeError(f"the acknowledgement: {answer.text}")
        self.until(lambda: self.started(job_id, 1), "the job's next attempt", 90.0)
        return move

    def free_nodes(self) -> list[str]:
        """Return the nodes that no job holds."""
        state = self.slurm.observe()
        taken = {node for job in state.jobs if not job.state.finished for node in job.nodes}
        return [node.name for node in state.nodes if node.name not in taken]

    def rented_nodes(self) -> list[Node]:
        """Return the rented nodes as polluxd reads them."""
        return [node for node in self.slurm.observe().nodes if "rented" in node.features]

    def until(self, ready: Callable[[], object], what: str, seconds: float = 60.0) -> None:
        seconds *= slowness()
        deadline = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {seconds:.0f} s in vain for {what}")
            time.sleep(0.1)

    def keep(self, job_id: int) -> None:
        """Let a job run until the end of the suite."""
        self._submitted.remove(job_id)

    def end_spawned(self) -> None:
        """End the processes that `spawn` started."""
        for process in self._spawned:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._spawned.clear()

    def clear(self) -> None:
        """End all processes and jobs of the attempt."""
        self.end_spawned()
        if self._submitted:
            self.cluster.command("scancel", *map(str, self._submitted))
            self.until(
                lambda: all(j.state.finished for j in self.slurm.jobs(self._submitted).values()), "scancel"
            )
        self._submitted.clear()

    # --- what an administrator may have done ---------------------------------------------------------------------

    def query(self, statement: str, *words: object) -> list[tuple[Any, ...]]:
        """Run a statement as the database's superuser."""
        assert self.cluster.postgres is not None
        with contextlib.closing(
            psycopg2.connect(self.cluster.postgres.admin_url.replace("+psycopg2", ""))
        ) as made:
            made.autocommit = True
            with made.cursor() as cursor:
                cursor.execute(statement, words or None)
                return list(cursor.fetchall()) if cursor.description else []

    @contextmanager
    def undone(self, off: str, on: str) -> Iterator[None]:
        """Run a statement of the superuser, and undo it by another one."""
        self.query(off)
        try:
            yield
        finally:
            self.query(on)

    def names_unseen(self) -> AbstractContextManager[None]:
        """Hide names of jobs from the submission hook, as a site's own hook may: polluxd has defences of its own."""
        return self.hook(_NAME_UNSEEN)

    @contextmanager
    def hook(self, lines: str) -> Iterator[None]:
        """Append lines to the site's submission hook."""
        hook = self.cluster.slurm_conf.with_name("job_submit.lua")
        before = hook.read_text()
        self._rewrite(hook, before + lines)
        try:
            yield
        finally:
            self._rewrite(hook, before)

    @staticmethod
    def _rewrite(hook: Path, text: str) -> None:
        # slurmctld reads the script again only if its modification time, in whole seconds, is newer.
        newer = hook.stat().st_mtime + 2
        hook.write_text(text)
        os.utime(hook, (newer, newer))
