"""A private cluster with polluxd, and what three users do on it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pwd
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg2

from contrib.attack.messages import Answer, Request, Result, report
from contrib.devcluster import DevCluster, Polluxd
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


class GatewayService:
    """The gateway of a cluster. Floods come from other machines: here they take no CPU from it."""

    def __init__(self, cluster: DevCluster) -> None:
        self._all = cluster.gateways
        (self.url,) = self._all.addresses
        self.config = cluster.directory / "polluxd" / "gateway-0.toml"

    def start(self) -> None:
        """Start it; return when it answers."""
        self._all.start()
        for thread in os.listdir(f"/proc/{self._all.pid()}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), -15)

    def stop(self) -> None:
        self._all.stop()

    def restart(self) -> None:
        """Start it again: it then remembers no token."""
        self.stop()
        self.start()

    def memory_mb(self) -> int:
        """Return the largest memory that the process has had. proc(5)."""
        lines = Path(f"/proc/{self._all.pid()}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024


class Hand:
    """A function of the hands that goes on beside the suite."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self._said = process, process.stdout or io.StringIO()

    def line(self) -> str:
        """Wait for its next line."""
        return self._said.readline().strip()

    def rest(self) -> str:
        """Wait for its end; return what else it prints."""
        said = self._said.read().strip()
        self._process.wait()
        return said

    def stop(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._said.close()


class Site:
    """The cluster, its users and what each of them may do.

    Args:
        folder: of scripts; every user may read it.
        gpus: of the whole cluster.
        interval_s: between two decisions.
    """

    def __init__(
        self, cluster: DevCluster, folder: Path, polluxd: Polluxd, gpus: int, interval_s: float
    ) -> None:
        self.cluster, self.folder, self.polluxd = cluster, folder, polluxd
        self.gpus, self.interval_s = gpus, interval_s
        self.gateway = GatewayService(cluster)
        self.power: PowerSaving | None = None
        """Of the rented nodes, where there are any."""
        self.slurm: SlurmClient = open_client("auto", conf=cluster.slurm_conf, timeout=20)
        self.store = Store(cluster.database_url, cluster.cluster_name)
        self._submitted: list[int] = []
        self._begun: list[Hand] = []
        self._residents: dict[str, int] = {}
        self.kept: set[int] = set()
        """Jobs that run until the end of the suite."""
        self._tokens: dict[tuple[str, int, int], str] = {}
        self.residents_training: Any = None

    # --- what users do ---------------------------------------------------------------------------

    def words(self, user: str, **environment: str) -> dict[str, Any]:
        """Return the arguments with which subprocess runs a command as a user."""
        entry = pwd.getpwnam(f"pollux-{user}")
        return {
            "env": {**self.cluster.client_environment, "HOME": str(self.home(user)), "USER": entry.pw_name}
            | environment,
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

    def begin(self, user: str, *words: object, silent: bool = False) -> Hand:
        """Start a function of the hands as a user; `clear` ends it. `silent`: nobody reads what it prints."""
        with (self.folder / f"begun-{len(self._begun)}-{user}.log").open("w") as sink:
            out = subprocess.DEVNULL if silent else subprocess.PIPE
            command, more = self.command(*words), self.words(user)
            process = subprocess.Popen(command, stdout=out, stderr=sink, start_new_session=True, **more)
        self._begun.append(Hand(process))
        return self._begun[-1]

    def hands(self, user: str, *words: object, timeout_s: float = 60.0, may_fail: bool = False) -> str:
        """Run a function of `contrib.attack.hands` as a user; return its output.

        Raises RuntimeError where it breaks, unless it `may_fail`: its errors then follow its output, on one line.
        """
        done = self.run(user, *self.command(*words), timeout_s=timeout_s)
        if done.returncode and not may_fail:
            raise RuntimeError(f"{words[:2]}: {done.stderr[-400:]}")
        return " ".join((done.stdout + done.stderr[-400:]).split()) if may_fail else done.stdout

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
        return [Answer(**json.loads(line)) for line in said.splitlines()]

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

    def reported(self, user: str, job_id: int, attempt: int = 0, **changes: Any) -> None:
        """Wait until a report of the job is accepted."""

        def accepted() -> bool:
            with contextlib.suppress(RuntimeError):
                said = ("POST", "/v1/report", report(**changes))
                return self.ask(user, said, token=self.token(user, job_id, attempt))[0].ok
            return False

        self.until(accepted, f"a report of {user}'s job {job_id}, attempt {attempt}", 90.0)

    def uid(self, user: str) -> int:
        return pwd.getpwnam(f"pollux-{user}").pw_uid

    @staticmethod
    def address() -> str:
        """Return an address of this machine off loopback."""
        shown = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout
        return shown.split()[0]

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

    def submit(self, user: str, script: Path, *options: str) -> int:
        """Submit a script; return the job's id. Raises RuntimeError."""
        job_id, trouble = self.sbatch(user, script, *options)
        if job_id is None:
            raise RuntimeError(trouble)
        return job_id

    def pollux_job(self, user: str, directive: str = "max-gpus=1", *options: str) -> int:
        """Submit a Pollux job that sleeps; return its id once it holds GPUs."""
        script = self.script(f"pollux-{user}.sh", f"#POLLUX {directive}")
        job_id = self.submit(user, script, "--gres=gpu:1", "--open-mode=append", *options)
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
            self.kept.add(self._residents[user])
            self.reported(user, self._residents[user])
        return self._residents[user]

    def job(self, job_id: int) -> SlurmJob:
        """Return the job as polluxd reads it."""
        return self.slurm.jobs([job_id])[job_id]

    def held(self, *jobs: int) -> int:
        """Return the number of GPUs that jobs hold."""
        found = self.slurm.jobs(jobs).values()
        return sum(sum(job.gpus_per_node_held.values()) for job in found if not job.state.finished)

    def cycles(self) -> int:
        """Return the number of polluxd's newest decision."""
        return int(self.query("SELECT coalesce(max(id), 0) FROM pollux.cycle")[0][0])

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
        there = Placement((self.free_nodes()[0],), 1)
        move = self.plan(job_id, Placement(self.job(job_id).nodes, 1), there, path="requeue")
        assert self.ordered(user, job_id, "drain") == move.id
        said = ("POST", "/v1/acknowledgements", {"move": move.id, **facts})
        (answer,) = self.ask(user, said, token=self.token(user, job_id))
        if not answer.ok or not answer.document["accepted"]:
            raise RuntimeError(f"the acknowledgement: {answer.text}")
        self.until(lambda: self.started(job_id, 1), "the job's next attempt", 90.0)
        return move

    def ordered(self, user: str, job_id: int, what: str) -> Any:
        """Wait until a job's orders say something of `what`; return it."""
        token, found = self.token(user, job_id), list[Any]()

        def there() -> bool:
            (answer,) = self.ask(user, ("GET", "/v1/orders?seen=", None), token=token)
            found.append(answer.document[what] if answer.ok else None)
            return bool(found[-1])

        self.until(there, f"an order to {what}", 40.0)
        return found[-1]

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

    def end_hands(self) -> None:
        """End what `begin` started."""
        for hand in self._begun:
            hand.end()
        self._begun.clear()

    def clear(self) -> None:
        """End all processes and jobs of the attempt."""
        self.end_hands()
        jobs, self._submitted = [job for job in self._submitted if job not in self.kept], []
        if jobs:
            self.cluster.command("scancel", *map(str, jobs))
            self.until(lambda: all(j.state.finished for j in self.slurm.jobs(jobs).values()), "scancel")

    # --- what an administrator may have done ---------------------------------------------------------------------

    def submit_unseen(self, script: Path, *options: str) -> int:
        """Have mallory submit a job whose name the hook does not see, as a site's own may hide it from polluxd's."""
        with self.hook(_NAME_UNSEEN):
            return self.submit("mallory", script, *options)

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
