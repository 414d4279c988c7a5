"""Measure what another user notices of floods at the gateway; write tests/benchmarks/floods.md.

    python -m tests.benchmarks.floods [--connections 1500] [--rounds 15] [--out FILE]

Needs root: the flood's clients are another user's. The gateway is a process with its own Postgres; munge is a stand-in
that takes a millisecond, and says who asks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from contrib.commit import COMMIT
from contrib.devcluster.postgres import DevPostgres
from polluxd.store import Store
from polluxd.store.gateway_statements import GatewayStore
from tests.integration.gateway.serving import Caller, serving, token_of, user_token_of
from tests.integration.store.conftest import introduce
from tests.integration.store.reports import payload

PAGE = Path(__file__).with_suffix(".md")
CLUSTER, ALICE, BOB = "floods", 12345, 2000
ALLOWED_S = 0.5
"""By which a question of another user may take longer."""
KINDS = {
    "none": "nobody else asks",
    "credentials": "credentials that are no good, from one address",
    "credentials-addresses": "the same, from as many addresses",
    "tokens-addresses": "tokens that nobody gave out, from as many addresses",
    "garbage-addresses": "paths that do not exist, and no token, from as many addresses",
    "again-addresses": "one byte, and again, from as many addresses",
    "silent-addresses": "one byte, and silence, from as many addresses",
    "questions": "histories of 172,800 reports, by good tokens",
    "unread": "the same, and no answer is read",
}
HEAD = """\
# What others notice of floods

`python -m tests.benchmarks.floods` has one user (alice) open {connections:,} connections of a kind to a
gateway, all at once, and again wherever one is closed. Another user (bob) asks beside them: a question is a
token for a credential and a list, on a new connection; a report goes over a connection that is kept, and waits
up to 0.2 s to be stored with others. Each cell has the median and the longest of {rounds} [s]. At most
{allowed} s more than beside nobody is what the gateway promises bob. Gateway and Postgres are on the clients'
machine (two cores, which other work shares), the gateway at nice -10 and the flood at 5. Commit {commit}.

| flood | questions | reports | refused | median more |
|---|---:|---:|---:|---:|
"""


class Munge:
    """Says who asks: the number in the credential."""

    def decode(self, credential: bytes) -> tuple[bytes, int]:
        from pollux.scheduler.munge import MungeError

        time.sleep(0.001)
        uid = credential.removeprefix(b"MUNGE:").removesuffix(b":")
        if not uid.isdigit():
            raise MungeError("no credential")
        return json.dumps({"purpose": "user", "nonce": "0" * 32}).encode(), int(uid)


class Questions:
    """Histories as the database has them; a list of a hundred jobs."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def jobs(self, uid: int, *, ended: bool) -> Any:
        return [{"job_id": number, "name": "x" * 50, "ended": ended} for number in range(100)]

    def history(self, uid: int, job: int, since: float) -> Any:
        return [[p.at, p.goodput, p.batch_size, "x" * 300] for p in self._store.report_history(job)]


def serve(url: str, gateway_url: str) -> None:
    """Be the gateway until standard input ends."""
    with contextlib.suppress(PermissionError):
        os.nice(-10)
    questions = Questions(Store(gateway_url, CLUSTER, statement_timeout=2.0))
    with serving(
        GatewayStore(gateway_url, CLUSTER), cluster=CLUSTER, munge=Munge(), questions=questions
    ) as at:
        print(at, flush=True)
        sys.stdin.read()


def request_of(kind: str, tokens: list[str]) -> bytes:
    """Return what a connection of a flood sends."""
    head = "Host: x\r\n"
    match kind:
        case "credentials":
            body = '{"credential": "MUNGE:bad:"}'
            return f"POST /v1/tokens HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
        case "tokens":
            token = "J.7.0." + os.urandom(22).hex()[:43]
            return f"GET /v1/orders HTTP/1.1\r\n{head}Authorization: Bearer {token}\r\n\r\n".encode()
        case "garbage":
            return f"GET /v1/jobs/{'9' * 500}/explain HTTP/1.1\r\n{head}\r\n".encode()
        case "questions" | "unread":
            token = tokens[os.urandom(1)[0] % len(tokens)]
            return f"GET /v1/jobs/7/history HTTP/1.1\r\n{head}Authorization: Bearer {token}\r\n\r\n".encode()
    return b"G"


async def flood(kind: str, url: str, connections: int, tokens: list[str]) -> None:
    """Be the flood until the process is ended."""
    kind, _, addresses = kind.partition("-")
    parts = urlsplit(url)

    async def one(number: int) -> None:
        source = f"127.{1 + number // 250 % 250}.{number % 250}.2" if addresses else "127.0.0.1"
        while True:
            try:
                reader, writer = await asyncio.open_connection(
                    parts.hostname, parts.port, local_addr=(source, 0), limit=65536
                )
            except OSError:
                await asyncio.sleep(0.01)
                continue
            with contextlib.suppress(OSError):
                while not reader.at_eof():
                    writer.write(request_of(kind, tokens))
                    if kind == "again":
                        await asyncio.sleep(0.2)
                        break
                    if kind in ("silent", "unread"):
                        await asyncio.sleep(20.0)
                        break
                    if not await reader.read(65536):
                        break
            writer.transport.abort()
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(one(number)) for number in range(connections)]
    await asyncio.sleep(2.0)
    print("flooding", flush=True)
    await asyncio.gather(*tasks)


@contextlib.contextmanager
def process(*words: str, user: int | None = None) -> Iterator[str]:
    """Run this program with other words; yield the first line that it prints."""
    command = [sys.executable, "-m", "tests.benchmarks.floods", *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, user=user
    ) as running:
        try:
            assert running.stdout is not None
            yield running.stdout.readline().strip()
        finally:
            running.terminate()
            running.wait()


def asked(url: str, report: Caller, rounds: int) -> tuple[list[float], list[float], int]:
    """Return seconds of bob's questions and reports, and how many were refused."""
    questions, reports, refused = [], [], 0
    for _ in range(rounds):
        began = time.monotonic()
        try:
            caller = Caller(url)
            status, answer = caller.ask("POST", "/v1/tokens", {"credential": f"MUNGE:{BOB}:"})
            if status == 200:
                caller.token = answer["token"]
                status, _ = caller.ask("GET", "/v1/jobs")
        except OSError:
            status = 0
        refused += status != 200
        questions.append(time.monotonic() - began)
        began = time.monotonic()
        try:
            refused += report.ask("POST", "/v1/report", payload())[0] != 204
        except OSError:
            report.connection.close()
            refused += 1
        reports.append(time.monotonic() - began)
        time.sleep(0.5)
    return questions, reports, refused


def measured(connections: int, rounds: int) -> list[str]:
    """Return the rows of the page."""
    rows: list[str] = []
    with tempfile.TemporaryDirectory(prefix="pollux-floods-") as folder:
        Path(folder).chmod(0o755)
        with DevPostgres(Path(folder) / "postgres") as postgres:
            for url in (postgres.admin_url, postgres.url):
                store = Store(url, CLUSTER)
                store.migrate()
                store.close()
            records = GatewayStore(postgres.gateway_url, CLUSTER)
            for job, uid in ((7, ALICE), (8, BOB)):
                introduce(postgres, CLUSTER, job, uid)
            with process("--serve", postgres.url, postgres.gateway_url) as at:
                alice = Caller(at, token_of(records, 7, uid=ALICE))
                assert alice.ask("POST", "/v1/report", payload())[0] == 204
                postgres.execute(
                    "INSERT INTO pollux.report_history (cluster, job_id, attempt, uid, received_at, report)"
                    " SELECT cluster, job_id, attempt, uid, now() - n * interval '0.5 s', report"
                    " FROM pollux.report, generate_series(1, 172800) n WHERE job_id = 7; ANALYZE pollux.report_history"
                )
                report = Caller(at, token_of(records, 8, uid=BOB))
                base = [0.0, 0.0]
                for kind, words in KINDS.items():
                    tokens = [user_token_of(records, ALICE) for _ in range(8)]
                    with contextlib.ExitStack() as stack:
                        if kind != "none":
                            more = ("--flood", kind, at, str(connections), *tokens)
                            assert stack.enter_context(process(*more, user=ALICE)) == "flooding"
                        questions, reports, refused = asked(at, report, rounds)
                    middle = [statistics.median(questions), statistics.median(reports)]
                    base = middle if kind == "none" else base
                    rise = max(now - before for now, before in zip(middle, base, strict=True))
                    cells = [f"{statistics.median(s):.2f} ({max(s):.2f})" for s in (questions, reports)]
                    rows.append(f"| {words} | {' | '.join(cells)} | {refused} | {rise:.2f} |")
                    print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure, or be one of the processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--connections", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--serve", nargs=2)
    parser.add_argument("--flood", nargs="+")
    chosen = parser.parse_args()
    if chosen.serve:
        serve(*chosen.serve)
    elif chosen.flood:
        kind, url, connections, *tokens = chosen.flood
        with contextlib.suppress(OSError):
            os.nice(5)
        asyncio.run(flood(kind, url, int(connections), tokens))
    else:
        rows = measured(chosen.connections, chosen.rounds)
        words = {
            "connections": chosen.connections,
            "rounds": chosen.rounds,
            "allowed": ALLOWED_S,
            "commit": COMMIT,
        }
        chosen.out.write_text(HEAD.format(**words) + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
