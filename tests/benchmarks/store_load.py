"""Measure what 2,000 agents cost the gateway and Postgres.

The gateway, Postgres, Slurm and munge are real. Each agent reports every 30 s on one connection and waits for orders on
another; half of the agents get an order a minute and acknowledge it at once. polluxd's part runs beside them: it syncs
the jobs, takes in what agents wrote, reads the reports, and looks for news. The cost is the CPU time of the gateway and
of Postgres, in shares of one core; the agents, which are another process, do not count. Tokens are written into the
table: munge makes them for the user who runs this alone. Run it by `make bench-store`, as root.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import secrets
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg2

from contrib.devcluster import DevCluster
from contrib.devcluster.processes import descendants
from polluxd.model import Placement
from polluxd.slurm.protocol import SlurmJob
from polluxd.store import Store
from tests.benchmarks.results import save
from tests.build import slurm_job
from tests.integration.store.reports import payload

CLUSTER = "bench"
POLL_S = 5.0
"""Between two syncs of jobs."""
BUSY_S = 1.0
"""Between two turns of polluxd while moves are open."""
DECISION_S = 10.0
"""Shortest time between two decisions."""
TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far [s]; 0 where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICK


def memory_mb(*pids: int) -> float:
    """Return the memory of processes, with shared pages counted once."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def job(job_id: int, uid: int, submitted: float) -> SlurmJob:
    at = Placement((f"n{job_id % 500}",), 4)
    return slurm_job(job_id, at=at, user=f"user{uid}", uid=uid, submit_time=submitted, start_time=submitted)


class Line:
    """One kept connection that speaks just enough HTTP."""

    def __init__(self, port: int, token: str) -> None:
        self._port = port
        self._head = f"Host: gateway\r\nAuthorization: Bearer {token}\r\n"
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        if self._open is None:
            self._open = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._open
        if reader.at_eof():
            reader, writer = self._open = await asyncio.open_connection("127.0.0.1", self._port)
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        writer.write(f"{method} {path} HTTP/1.1\r\n{self._head}{length}\r\n".encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head.split(b" ", 2)[1])
        size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0) if status != 204 else 0
        return status, await reader.readexactly(size)


async def agent(
    number: int, port: int, token: str, begin: float, interval: float, log: dict[str, Any]
) -> None:
    reports, orders = Line(port, token), Line(port, token)
    lock = asyncio.Lock()

    async def send(path: str, document: object) -> None:
        async with lock:
            status, answer = await reports.ask("POST", path, json.dumps(document).encode())
        log["refused"] += status not in (200, 204)
        if status not in (200, 204):
            log["words"] = answer.decode()

    async def report() -> None:
        await asyncio.sleep(begin)
        while True:
            due = time.monotonic() + interval
            await send("/v1/report", payload())
            log["reports"] += 1
            await asyncio.sleep(due - time.monotonic())

    async def obey() -> None:
        seen = ""
        await asyncio.sleep(begin)
        while True:
            status, answer = await orders.ask("GET", f"/v1/orders?seen={seen}")
            log["polls"] += 1
            if status != 200:
                log["refused"] += 1
                log["words"] = answer.decode()
                await asyncio.sleep(1)
                continue
            found = json.loads(answer)
            seen = found["seen"]
            if found["drain"] is not None:
                log["received"][found["drain"]] = time.time()
                await send("/v1/acknowledgements", {"move": found["drain"], "step": 1})

    await asyncio.gather(report(), obey())


def play_agents(port: int, tokens: list[str], interval: float, ready: Any, stop: Any, out: Any) -> None:
    """Run all agents; the process of the clients."""

    async def run() -> None:
        log: dict[str, Any] = {"reports": 0, "polls": 0, "refused": 0, "received": {}, "words": ""}
        count = len(tokens)
        tasks = [
            asyncio.create_task(agent(n, port, token, interval * n / count, interval, log))
            for n, token in enumerate(tokens)
        ]
        await asyncio.sleep(interval + 5)
        before = {name: log[name] for name in ("reports", "polls", "refused")}
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.2)
            for task in tasks:
                if task.done():
                    task.result()
        counts = {name: log[name] - before[name] for name in before}
        out.put(counts | {"received": log["received"], "words": log["words"]})
        for task in tasks:
            task.cancel()

    asyncio.run(run())


def give_tokens(connection: Any, jobs: list[SlurmJob]) -> list[str]:
    tokens = [f"J.{each.job_id}.0.{secrets.token_urlsafe(32)}" for each in jobs]
    with connection.cursor() as cursor:
        for each, token in zip(jobs, tokens, strict=True):
            cursor.execute(
                "INSERT INTO pollux.token (hash, cluster, job_id, attempt, uid) VALUES (%s, %s, %s, 0, %s)",
                (hashlib.sha256(token.encode()).digest(), CLUSTER, each.job_id, each.uid),
            )
    return tokens


def order(connection: Any, job_id: int, epoch: int) -> int:
    """Order a drain as polluxd does: the intent first, then the order."""
    with connection.cursor() as cursor:
        place = json.dumps({"nodes": ["n1"], "gpus_per_node": 4})
        cursor.execute(
            "INSERT INTO pollux.move (cluster, job_id, attempt, path, source, target, reason, step, times, epoch)"
            " VALUES (%s, %s, 0, 'requeue', %s, %s, 'bench', 'planned', '{\"planned\": 1}', %s) RETURNING id",
            (CLUSTER, job_id, place, place, epoch),
        )
        (move,) = cursor.fetchone()
        cursor.execute(
            "UPDATE pollux.move SET step = 'draining', times = times || jsonb_build_object('draining', %s)"
            " WHERE id = %s",
            (time.time(), move),
        )
        return int(move)


def measure(agents: int, users: int, interval: float, seconds: float) -> dict[str, Any]:
    """Measure one run."""
    with tempfile.TemporaryDirectory(prefix="pollux-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with DevCluster(folder / "cluster", cluster_name=CLUSTER, publish_interval_s=interval) as cluster:
            store = Store(cluster.database_url, CLUSTER)
            epoch = store.lead()
            began = time.time()
            jobs = [job(number, 1000 + number % users, began) for number in range(1, agents + 1)]
            store.sync_jobs(jobs)
            owner = psycopg2.connect(cluster.database_url.replace("+psycopg2", ""))
            owner.autocommit = True
            return run(cluster, store, owner, epoch, jobs, give_tokens(owner, jobs), interval, seconds)


def run(
    cluster: DevCluster,
    store: Store,
    owner: Any,
    epoch: int,
    jobs: list[SlurmJob],
    tokens: list[str],
    interval: float,
    seconds: float,
) -> dict[str, Any]:
    server, pid = cluster.postgres.pid, cluster.gateways.pid()
    port = int(cluster.gateways.addresses[0].rpartition(":")[2])
    spawn = multiprocessing.get_context("spawn")
    ready, stop, out = spawn.Event(), spawn.Event(), spawn.Queue()
    clients = spawn.Process(target=play_agents, args=(port, tokens, interval, ready, stop, out))
    clients.start()
    try:
        assert ready.wait(interval + 120), "the agents did not begin"

        def backends(role: str) -> list[int]:
            with owner.cursor() as cursor:
                cursor.execute("SELECT pid FROM pg_stat_activity WHERE usename = %s", (role,))
                return [row[0] for row in cursor.fetchall()]

        theirs = backends("pollux_gateway")

        def used() -> tuple[float, float, float]:
            every = [server, *descendants((server,))]
            return cpu_seconds(pid), sum(map(cpu_seconds, theirs)), sum(map(cpu_seconds, every))

        before, clock = used(), time.monotonic()
        ordered: dict[int, int] = {}
        every_s = 60.0 / (len(jobs) / 2)
        polled = synced = news = decided = clock
        turns = 0
        while (now := time.monotonic()) < clock + seconds:
            if now >= clock + len(ordered) * every_s:
                chosen = jobs[(2 * len(ordered)) % len(jobs)]
                ordered[order(owner, chosen.job_id, epoch)] = chosen.job_id
                continue
            if now >= news + 0.5:
                store.news()
                news = now
            if now >= polled + BUSY_S:
                store.take_in()
                assert len(store.reports()) <= len(jobs)
                with owner.cursor() as cursor:
                    # What follows a checkpoint is none of the gateway's business.
                    cursor.execute(
                        "UPDATE pollux.move SET step = 'failed', times = times || '{\"failed\": 1}'"
                        " WHERE cluster = %s AND step = 'checkpointed'",
                        (CLUSTER,),
                    )
                polled, turns = now, turns + 1
            if now >= synced + POLL_S:
                store.sync_jobs(jobs)
                synced = now
            if now >= decided + DECISION_S:
                store.remember_fits()
                decided = now
            time.sleep(0.005)
        wall = time.monotonic() - clock
        after = used()
        memory = memory_mb(pid), memory_mb(server, *descendants((server,)))
        time.sleep(2)
        stop.set()
        seen = out.get(timeout=60)
    finally:
        stop.set()
        clients.join(30)
    with owner.cursor() as cursor:
        cursor.execute(
            "SELECT m.id, (m.times ->> 'draining')::float8, extract(epoch FROM a.received_at)::float8"
            " FROM pollux.move m LEFT JOIN pollux.acknowledgement a ON a.move_id = m.id WHERE m.cluster = %s",
            (CLUSTER,),
        )
        rows = cursor.fetchall()
    received = {int(move): at for move, at in seen["received"].items()}
    to_agent = sorted(received[m] - at for m, at, _ in rows if m in received)
    to_acknowledgement = sorted(a - at for _, at, a in rows if a is not None)
    in_gateway, of_gateway, postgres = (b - a for a, b in zip(before, after, strict=True))
    store.close()
    owner.close()
    return {
        "agents": len(jobs),
        "interval_s": interval,
        "seconds": round(wall, 1),
        "reports": seen["reports"],
        "questions for orders": seen["polls"],
        "orders": len(rows),
        "acknowledged": len(to_acknowledgement),
        "refused": seen["refused"],
        "words": seen["words"],
        "gateway_share": round(in_gateway / wall, 4),
        "postgres_share_of_gateway": round(of_gateway / wall, 4),
        "postgres_share": round(postgres / wall, 4),
        "share_of_a_core": round((in_gateway + postgres) / wall, 4),
        "gateway_mb": round(memory[0]),
        "postgres_mb": round(memory[1]),
        "order_to_agent_s": {"p50": at(to_agent, 0.5), "p99": at(to_agent, 0.99)},
        "order_to_acknowledgement_s": {
            "p50": at(to_acknowledgement, 0.5),
            "p99": at(to_acknowledgement, 0.99),
        },
        "load": os.getloadavg()[0],
    }


def at(values: list[float], share: float) -> float:
    return round(statistics.quantiles(values, n=1000)[min(int(share * 1000), 998)], 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=2000)
    parser.add_argument("--users", type=int, default=40)
    parser.add_argument("--interval", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--json", type=Path, default=Path("bench-out/store.json"))
    given = parser.parse_args()
    found = measure(given.agents, given.users, given.interval, given.seconds)
    save(given.json, found)
    print(json.dumps(found, indent=1))
    missed = [
        words
        for words, bad in (
            ("less than 15 % of a core", found["share_of_a_core"] >= 0.15),
            ("less than 300 MB", found["gateway_mb"] + found["postgres_mb"] >= 300),
            ("every order acknowledged", found["acknowledged"] < found["orders"]),
            ("an acknowledgement within 1 s (p99)", found["order_to_acknowledgement_s"]["p99"] >= 1),
            ("an order at its agent within 0.3 s (p50)", found["order_to_agent_s"]["p50"] >= 0.3),
        )
        if bad
    ]
    if missed:
        raise SystemExit(f"goals missed: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
