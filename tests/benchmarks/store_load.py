"""Measure the cost to Postgres of 2,000 agents that report every 30 s.

The cost is the server's CPU time, in shares of one core: of a report and of a turn of polluxd, times how often each
comes. So other work on the machine, which delays the reports of this one client, does not make the load smaller. Each
agent has a job, a role by its user, a token and a connection of its own, as after the prolog. The connections lead to
PgBouncer, as contrib/pgbouncer sets it up, or to the server itself; PgBouncer's CPU time counts, too. polluxd's part
runs beside them every 5 s: it syncs the jobs, takes in what agents wrote and reads the reports. The client's CPU time
does not count. Run it by `make bench-store`. It needs root, and several GB of memory for the connections.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg2

from contrib.devcluster.pooler import pooler
from contrib.devcluster.postgres import DevPostgres
from contrib.devcluster.processes import descendants
from polluxd.model import JobSpec, JobState
from polluxd.store import Store
from tests.integration.store.conftest import payload
from tests.integration.store.credentials import SECRET, login, token

CLUSTER = "bench"
POLL_S = 5.0
"""Between two turns of polluxd."""
TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(*servers: int) -> float:
    """Return the servers' CPU time so far [s], ended sessions included."""
    ticks = 0
    for pid in (*servers, *descendants(servers)):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        ticks += int(fields[11]) + int(fields[12])
        if pid in servers:
            ticks += int(fields[13]) + int(fields[14])
    return ticks / TICK


def memory_mb(*servers: int) -> float:
    """Return the servers' memory, by proportional set size.

    It counts shared pages once.
    """
    total = 0
    for pid in (*servers, *descendants(servers)):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def job(job_id: int, uid: int, submitted: float) -> Any:
    return SimpleNamespace(
        **{"job_id": job_id, "name": f"job {job_id}", "user": f"user{uid}", "uid": uid, "account": "a"},
        **{
            "partition": "p",
            "state": JobState.RUNNING,
            "raw_state": "RUNNING",
            "reason": "",
            "restart_count": 0,
        },
        **{"submit_time": submitted, "start_time": submitted, "end_time": None},
        **{"gpus_per_node_held": {f"n{job_id % 500}": 4}, "spec": JobSpec()},
    )


def measure(
    agents: int, users: int, interval: float, seconds: float, *, keep: bool = True, pooled: bool = False
) -> dict[str, Any]:
    """Measure one run.

    Args:
        keep: True: agents stay connected between reports. False: each agent connects, reports and leaves.
        pooled: connections lead to PgBouncer.
    """
    with tempfile.TemporaryDirectory(prefix="pollux-bench-") as folder, ExitStack() as stack:
        Path(folder).chmod(0o755)
        with DevPostgres(Path(folder) / "pg", max_connections=agents + 200) as postgres:
            store = Store(postgres.url, CLUSTER)
            store.migrate()
            store.install_secret(SECRET)
            assert store.lead() is not None
            began = time.time()
            jobs = [job(number, 1000 + number % users, began) for number in range(1, agents + 1)]
            store.sync_jobs(jobs)
            body = json.dumps(payload())
            sessions: dict[int, Any] = {}
            tokens = {each.job_id: token(CLUSTER, each.job_id, 0, each.uid) for each in jobs}
            logins = {uid: login(postgres, CLUSTER, uid) for uid in {each.uid for each in jobs}}

            pids = [postgres.pid]
            if pooled:
                daemon, dsn = stack.enter_context(pooler(postgres))
                pids.append(daemon.pid)
                logins = {uid: words.replace(postgres.agent_dsn, dsn) for uid, words in logins.items()}

            def publish(each: Any) -> None:
                session = sessions.get(each.job_id)
                if session is None:
                    session = psycopg2.connect(logins[each.uid])
                    session.autocommit = True
                with session.cursor() as cursor:
                    cursor.execute(
                        "SELECT pollux.publish_v1(%s, %s, 0, %s, %s, %s)",
                        (CLUSTER, each.job_id, each.uid, tokens[each.job_id], body),
                    )
                if keep:
                    sessions[each.job_id] = session
                else:
                    session.close()

            if keep:
                for each in jobs:
                    publish(each)
            at_start, clock = cpu_seconds(*pids), time.monotonic()
            sent, late, polled, polls, of_polls = 0, 0.0, clock, 0, 0.0
            while (now := time.monotonic()) < clock + seconds:
                due = clock + sent * interval / agents
                if now >= polled + POLL_S:
                    before = cpu_seconds(*pids)
                    store.sync_jobs(jobs)
                    store.take_in()
                    assert len(store.reports()) <= agents
                    of_polls += cpu_seconds(*pids) - before
                    polled, polls = now, polls + 1
                if now < due:
                    time.sleep(min(due - now, 0.05))
                    continue
                publish(jobs[sent % agents])
                late = max(late, now - due)
                sent += 1
            wall = time.monotonic() - clock
            used = cpu_seconds(*pids) - at_start
            report_s, poll_s = (used - of_polls) / sent, of_polls / polls
            result = {
                **{"agents": agents, "users": users, "interval_s": interval, "connections_kept": keep},
                "pooled": pooled,
                **{
                    "reports": sent,
                    "polls": polls,
                    "seconds": round(wall, 1),
                    "server_cpu_s": round(used, 2),
                },
                "report_ms": round(report_s * 1e3, 3),
                "poll_ms": round(poll_s * 1e3, 1),
                "share_of_a_core": round(report_s * agents / interval + poll_s / POLL_S, 4),
                "server_memory_mb": round(memory_mb(*pids)),
                "latest_report_s": round(late, 2),
            }
            for session in sessions.values():
                session.close()
            store.close()
            return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=2000)
    parser.add_argument("--users", type=int, default=40)
    parser.add_argument("--interval", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--json", type=Path, default=Path("bench-out/store.json"))
    given = parser.parse_args()
    runs = [
        measure(given.agents, given.users, given.interval, given.seconds, pooled=True),
        measure(given.agents, given.users, given.interval, given.seconds),
        measure(given.agents, given.users, given.interval, given.seconds / 2, keep=False),
    ]
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(runs, indent=1) + "\n")
    for run in runs:
        print(json.dumps(run))
    if runs[0]["share_of_a_core"] >= 0.2:
        raise SystemExit("2,000 agents must use less than 20 % of a core")


if __name__ == "__main__":
    main()
