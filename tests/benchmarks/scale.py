"""Measure polluxd with 10,000 jobs on 16,384 GPUs, and a real Postgres.

polluxd's cycle runs in a process of its own. Its `squeue` and `scontrol` are programs that print what those of 22.05
would. Between two cycles jobs end and arrive, every running job reports, and the plan is carried out in the text.
polluxd is in mode observe: what it costs to order moves is not measured. CPU time is that of polluxd's process alone;
the programs that print and the database do not count. Run it by `make bench-scale`, as root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from sqlalchemy import create_engine, text

from contrib.commit import COMMIT
from contrib.devcluster.postgres import DevPostgres
from polluxd.apply.reconciler import Reconciler
from polluxd.config.config_file import parse_config
from polluxd.cycle.controller import Controller
from polluxd.gateway.payloads import ReportMessage
from polluxd.policy import decide
from polluxd.slurm.scontrol import ScontrolClient
from polluxd.store import Store
from tests.benchmarks.results import ROOT, save
from tests.benchmarks.store_load import cpu_seconds
from tests.integration.store.conftest import payload
from tests.unit.slurm.squeue_stand_in import PENDING

CLUSTER = "bench"
NODES, PER_NODE = 2048, 8
CHURN = 0.002
"""Share of the jobs that end between two cycles, and are replaced: 20 of 10,000."""
CYCLES_14_DAYS = 14 * 1440
RERANKED = 5
"""Cycles from one change of all jobs' priorities to the next: Slurm's PriorityCalcPeriod is five minutes."""
AIMS = {
    "poll_cpu_s": 1.5,
    "cycle_cpu_s": 4.0,
    "cycle_wall_s": 8.0,
    "memory_mb": 400.0,
    "allocations_14_days_gb": 3.0,
}
_SEPARATOR, _END = "\x1f", "\x1e"


_PARKED = {"State": "PENDING", "NodeList": "", "tres-alloc": ""}


class Cluster:
    """The jobs and nodes that Slurm's text tells of."""

    def __init__(self, jobs: int, nodes: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.nodes = [f"n{number:04d}" for number in range(nodes)]
        self.newest = 0
        self.began = int(time.time())
        self.jobs: dict[int, dict[str, str]] = {}
        self.held: dict[int, tuple[tuple[str, ...], int]] = {}
        self.explored: dict[int, int] = {}
        self.ended: list[int] = []
        """Slurm shows them on for MinJobAge: one cycle here."""
        self.arrive(jobs)

    def arrive(self, jobs: int) -> None:
        for _ in range(jobs):
            self.newest += 1
            uid = 1000 + self.random.randrange(200)
            least, most = self.random.choice([1] * 9 + [2, 4]), self.random.choice([4, 8, 16, 32])
            self.jobs[self.newest] = PENDING | {
                "JobID": str(self.newest),
                "ArrayJobID": str(self.newest),
                "UserID": str(uid),
                "UserName": f"user{uid}",
                "Account": f"account{uid % 20}",
                "RestartCnt": "0",
                "SubmitTime": str(self.began),
                "Name": f"train-{self.newest}",
                "admin_comment": f"pollux:v1 min-gpus={least} max-gpus={most} cpus-per-gpu=2 submitted={self.began}",
            }

    def leave(self, jobs: int) -> None:
        for job_id in self.ended:
            del self.jobs[job_id]
        self.ended = self.random.sample(sorted(self.held), min(jobs, len(self.held)))
        for job_id in self.ended:
            del self.held[job_id]
            self.jobs[job_id] |= {"State": "COMPLETED", "EndTime": str(int(time.time()))}

    def rerank(self) -> None:
        """Give all jobs another priority."""
        for job in self.jobs.values():
            job["PriorityLong"] = str(int(job["PriorityLong"]) - 1)

    def place(self, plan: Mapping[int, tuple[tuple[str, ...], int]]) -> None:
        """Carry a plan out."""
        for job_id, (nodes, gpus) in plan.items():
            job = self.jobs.get(job_id)
            if job is None or self.held.get(job_id, ((), 0)) == (nodes, gpus):
                continue
            started = job_id in self.held
            self.held.pop(job_id, None)
            if not nodes:
                self.jobs[job_id] = job | {
                    "State": "PENDING",
                    "NodeList": "",
                    "RestartCnt": str(int(job["RestartCnt"]) + 1),
                }
                continue
            self.held[job_id] = nodes, gpus
            self.jobs[job_id] = job | {
                "State": "RUNNING",
                "Reason": "None",
                "RestartCnt": str(int(job["RestartCnt"]) + started),
                "StartTime": str(int(time.time())),
                "NodeList": ",".join(nodes),
                "BatchHost": nodes[0],
                "NumNodes": str(len(nodes)),
                "NumCPUs": str(2 * gpus * len(nodes)),
                "NumTasks": str(len(nodes)),
                "tres-per-node": f"gres:gpu:{gpus}",
                "tres-alloc": f"cpu={2 * gpus * len(nodes)},node={len(nodes)},gres/gpu={gpus * len(nodes)}",
            }

    def write(self, folder: Path) -> None:
        """Write what the programs print."""
        lines = [_SEPARATOR.join(list(job.values())[:-1]) for job in self.jobs.values()]
        (folder / "jobs").write_text("".join(f"{line}{_END}\n" for line in lines))
        names = [f"{job['JobID']}{_SEPARATOR}{job['Name']}{_END}\n" for job in self.jobs.values()]
        (folder / "names").write_text("".join(names))
        words = [f"{job['JobID']}|{job['JobID']}|N/A|||(null)|*:*:*|(null)\n" for job in self.jobs.values()]
        (folder / "words").write_text("".join(words))
        (folder / "nodes").write_text(self.nodes_text())

    def nodes_text(self) -> str:
        used: dict[str, int] = {}
        for nodes, gpus in self.held.values():
            for name in nodes:
                used[name] = used.get(name, 0) + gpus
        return "".join(
            f"NodeName={name} Arch=x86_64 CoresPerSocket=16 CPUAlloc={2 * used.get(name, 0)} "
            f"CPUEfctv=64 CPUTot=64 CPULoad=3.10 "
            f"AvailableFeatures=ib ActiveFeatures=ib Gres=gpu:{PER_NODE} GresDrain=N/A "
            f"GresUsed=gpu:{used.get(name, 0)}(IDX:0-7) "
            f"NodeAddr={name} NodeHostName={name} Version=22.05.8 OS=Linux RealMemory=500000 AllocMem=0 FreeMem=480000 "
            f"Sockets=4 Boards=1 State={'MIXED' if name in used else 'IDLE'} ThreadsPerCore=1 "
            f"TmpDisk=0 Weight=1 Owner=N/A "
            f"MCS_label=N/A Partitions=main BootTime=1795271000 SlurmdStartTime=1795271100 CfgTRES=cpu=64,gres/gpu=8\n"
            for name in self.nodes
        )


_PARTITION = (
    "PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A "
    "DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED "
    "MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=n[0000-2047] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO "
    "ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=131072 TotalNodes=2048\n"
)


_SQUEUE = """#!/bin/sh
[ -n "$SQUEUE_FORMAT2" ] || exec cat FOLDER/words
separator=${SQUEUE_FORMAT2#*:} separator=${separator%%,*} end=${SQUEUE_FORMAT2##*:}
case $SQUEUE_FORMAT2 in *Name:*) file=names ;; esac
case $SQUEUE_FORMAT2 in *UserID:*) file=jobs ;; esac
exec sed -e "s/\x1f/$separator/g" -e "s/\x1e$/$end/" FOLDER/$file
"""
_SCONTROL = """#!/bin/sh
case "$*" in
  *"show node"*) exec cat FOLDER/nodes ;;
  *"show partition"*) exec cat FOLDER/partition ;;
  *"show reservation"*) echo "No reservations in the system" ;;
  *"show config"*) echo "ClusterName             = bench" ;;
  *"show topology"*) ;;
esac
"""


def write_programs(folder: Path) -> None:
    (folder / "bin").mkdir()
    for name, script in (("squeue", _SQUEUE), ("scontrol", _SCONTROL)):
        program = folder / "bin" / name
        program.write_text(script.replace("FOLDER", str(folder)))
        program.chmod(0o755)
    (folder / "partition").write_text(_PARTITION)


def report(database: Any, cluster: Cluster) -> None:
    """Every running job reports."""
    rows, now = [], time.time()
    for job_id, (nodes, gpus) in cluster.held.items():
        job, rng, held = cluster.jobs[job_id], random.Random(job_id), len(nodes) * gpus
        scale = rng.uniform(0.5, 2.0)
        cluster.explored[job_id] = max(held, cluster.explored.get(job_id, 0))
        theta = (0.05 * scale, 0.002 * scale, 0.02, 0.001, 0.06, 0.002, 1.5)
        names = ("alpha_grad", "beta_grad", "alpha_local", "beta_local", "alpha_node", "beta_node", "gamma")
        body = payload(
            params=dict(zip(names, theta, strict=True)),
            noise={"sqr": 1.0, "var": rng.uniform(1, 200)},
            limits={"initial": 64, "maximum": 4096, "local_min": 8, "local_max": 256},
            **{"gpus": held, "nodes": len(nodes), "batch_size": 64 * held, "local_batch": 64},
            **{"explored_gpus": cluster.explored[job_id], "explored_nodes": len(nodes)},
            progress=10.0 + (now - cluster.began) * rng.uniform(0.5, 1.0),
            target=rng.uniform(1e4, 1e6),
        )
        fixed = {
            "cluster": CLUSTER,
            "job_id": job_id,
            "attempt": int(job["RestartCnt"]),
            "uid": int(job["UserID"]),
        }
        message = ReportMessage.model_validate_json(json.dumps(body))
        rows.append(fixed | {"wakes": False, "report": message.document()})
    with database.begin() as connection:
        connection.execute(text(_REPORT), {"rows": json.dumps(rows)})


_REPORT = """
INSERT INTO pollux.report_history OVERRIDING SYSTEM VALUE
SELECT p.* FROM jsonb_array_elements(CAST(:rows AS jsonb)) r,
LATERAL jsonb_populate_record(CAST(NULL AS pollux.report_history), r || jsonb_build_object(
    'id', nextval('pollux.report_history_id_seq'), 'received_at', clock_timestamp())) p
"""


def daemon(url: str) -> None:
    """Run a poll or a decision for each line of standard input."""
    config = parse_config(
        {
            "slurm": {"cluster": CLUSTER, "timeout_s": 60.0},
            "database": {"url": url},
            "cycle": {"leader_lease_s": 61.0},
        },
        "bench",
    )
    store = Store(url, CLUSTER, statement_timeout=60, lease_s=15)
    assert store.lead() is not None
    slurm = ScontrolClient(timeout=60)
    plans: list[Any] = []

    def policy(snapshot: Any, cache: Any) -> Any:
        plans[:] = [decide(snapshot, cache=cache)]
        return plans[0]

    clock = [0.0]
    reconciler = Reconciler(
        slurm, store, limits=config.moves, lease=config.slurm.lease_s, authorize=lambda: store.epoch or 0
    )
    controller = Controller(config, slurm, store, reconciler, monotonic=lambda: clock[0], policy=policy)
    for line in sys.stdin:
        clock[0] += 1000.0 if line.strip() == "decide" else 0.0
        cpu, wall = time.process_time(), time.monotonic()
        result = controller.step()
        told: dict[str, Any] = {
            "cpu_s": time.process_time() - cpu,
            "wall_s": time.monotonic() - wall,
            "rss_mb": _status("VmRSS"),
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "lease_left_s": store.lease_left,
            "epoch": store.epoch,
        }
        if result.decided:
            told["plan"] = {
                a.job_id: (a.placement.nodes, a.placement.gpus_per_node) for a in plans[0].allocations
            }
        print(json.dumps(told), flush=True)


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))


@dataclass
class Figures:
    """What was measured, by cycle."""

    polls: list[dict[str, float]] = field(default_factory=list)
    decisions: list[dict[str, float]] = field(default_factory=list)
    database_s: list[float] = field(default_factory=list)
    """CPU time of Postgres in a cycle: a poll and a decision."""
    written: list[dict[str, int]] = field(default_factory=list)
    """Rows written in a cycle, by table."""
    bytes: list[int] = field(default_factory=list)
    """Size of the allocations' table and its indexes."""


_SIZE = "SELECT pg_total_relation_size('pollux.allocation')"
_WRITTEN = """SELECT relname, n_tup_ins + n_tup_upd AS written FROM pg_stat_user_tables
WHERE schemaname = 'pollux' AND relname IN ('job', 'allocation')"""


def unit_environment() -> dict[str, str]:
    """Return the environment that polluxd's systemd unit sets."""
    lines = (ROOT / "contrib/systemd/polluxd.service").read_text().splitlines()
    words = " ".join(line.removeprefix("Environment=") for line in lines if line.startswith("Environment="))
    return dict(word.split("=", 1) for word in words.split())


def measure(
    jobs: int, cycles: int, nodes: int, then: Callable[[DevPostgres], None] = lambda _postgres: None
) -> Figures:
    """Run the cycles; call `then` while the database still runs."""
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="pollux-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        write_programs(folder)
        cluster = Cluster(jobs, nodes, seed=1)
        with DevPostgres(folder / "pg") as postgres:
            store = Store(postgres.url, CLUSTER)
            store.migrate()
            store.close()
            database = create_engine(postgres.url)
            cluster.write(folder)
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.scale", "--daemon", postgres.url],
                env=os.environ | unit_environment() | {"PATH": f"{folder}/bin:{os.environ['PATH']}"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

            def ask(what: str) -> dict[str, Any]:
                child.stdin.write(what + "\n")
                child.stdin.flush()
                return json.loads(child.stdout.readline())

            before: Mapping[str, int] = {}
            try:
                for number in range(cycles):
                    used = cpu_seconds(postgres.pid)
                    poll = ask("poll")
                    decided = ask("decide")
                    figures.database_s.append(cpu_seconds(postgres.pid) - used)
                    plan = {
                        int(job_id): (tuple(on), gpus) for job_id, (on, gpus) in decided.pop("plan").items()
                    }
                    figures.polls.append(poll)
                    figures.decisions.append(decided)
                    with database.begin() as connection:
                        connection.execute(text("SELECT pg_stat_force_next_flush()"))
                        now = {row.relname: row.written for row in connection.execute(text(_WRITTEN))}
                        size = connection.execute(text(_SIZE)).scalar_one()
                    figures.written.append({key: now[key] - before.get(key, 0) for key in now})
                    figures.bytes.append(size)
                    before = now
                    cluster.place(plan)
                    cluster.leave(round(CHURN * jobs))
                    cluster.arrive(jobs + len(cluster.ended) - len(cluster.jobs))
                    if number % RERANKED == RERANKED - 1:
                        cluster.rerank()
                    cluster.write(folder)
                    report(database, cluster)
                    print(
                        f"cycle {number + 1}: poll {poll['cpu_s']:.2f} s, decision {decided['cpu_s']:.2f} s CPU, "
                        f"{decided['wall_s']:.2f} s wall, {decided['rss_mb']:.0f} MB, {figures.written[-1]}, "
                        f"{len(cluster.held)} running",
                        flush=True,
                    )
                then(postgres)
            finally:
                child.stdin.close()
                child.wait()
                database.dispose()
    return figures


def summary(figures: Figures, jobs: int, nodes: int) -> dict[str, Any]:
    """Return the figures of steady cycles. The first tenth, at least two, fills the cluster."""
    steady = max(2, len(figures.polls) // 10)
    polls, decisions = figures.polls[steady:], figures.decisions[steady:]
    growth = (figures.bytes[-1] - figures.bytes[steady]) / max(len(figures.bytes) - 1 - steady, 1)
    return {
        "jobs": jobs,
        "gpus": nodes * PER_NODE,
        "cycles": len(figures.polls),
        "poll_cpu_s": round(median(p["cpu_s"] for p in polls), 2),
        "poll_reranked_cpu_s": round(
            median([p["cpu_s"] for p in figures.polls][RERANKED::RERANKED] or [0.0]), 2
        ),
        "poll_wall_s": round(median(p["wall_s"] for p in polls), 2),
        "cycle_cpu_s": round(median(d["cpu_s"] for d in decisions), 2),
        "cycle_wall_s": round(median(d["wall_s"] for d in decisions), 2),
        "slowest_cycle_wall_s": round(max(d["wall_s"] for d in decisions), 2),
        "database_cpu_s": round(median(figures.database_s[steady:]), 2),
        "memory_mb": round(max(d["peak_mb"] for d in figures.decisions)),
        "memory_after_mb": [round(decisions[at]["rss_mb"]) for at in (0, len(decisions) // 2, -1)],
        "least_lease_left_s": round(min(d["lease_left_s"] for d in decisions), 1),
        "epochs": len({d["epoch"] for d in figures.decisions}),
        "job_rows_written": round(fmean(w["job"] for w in figures.written[steady:])),
        "allocation_rows_written": round(fmean(w["allocation"] for w in figures.written[steady:])),
        "allocations_14_days_gb": round(growth * CYCLES_14_DAYS / 1e9, 2),
    }


def write_page(path: Path, found: Mapping[str, Any]) -> None:
    rows = (
        ("CPU time of a poll [s]", "poll_cpu_s"),
        ("CPU time of a decision cycle, its poll included [s]", "cycle_cpu_s"),
        ("wall-clock time of a decision cycle [s]", "cycle_wall_s"),
        ("most memory [MB]", "memory_mb"),
        ("decisions stored in 14 days, extrapolated [GB]", "allocations_14_days_gb"),
    )
    lines = [f"| {words} | {AIMS[key]:g} | {found[key]:g} |" for words, key in rows]
    memory = ", ".join(map(str, found["memory_after_mb"]))
    path.write_text(_PAGE.format(**found, rows="\n".join(lines), commit=COMMIT, memory=memory))


_PAGE = """# Scale

`make bench-scale` (as root) runs polluxd's cycle with {jobs:,} jobs on {gpus:,} GPUs and a real Postgres. Slurm is a
pair of programs that print what `squeue` and `scontrol` of 22.05 would. Between two cycles, {leave} jobs end and others
arrive, every running job reports, and the plan is carried out. polluxd is in mode observe: ordering moves is not
measured. It has the environment of its systemd unit. CPU time is polluxd's own. {cycles} cycles; medians of the
steady ones; commit {commit}.

| measured | aim: below | found |
|---|---|---|
{rows}

- Rows written in a poll and a decision cycle: {job_rows_written:,} of {jobs:,} jobs, {allocation_rows_written:,} of
  {jobs:,} decisions.
- CPU time of a poll after Slurm has changed the priority of all jobs (every fifth cycle): {poll_reranked_cpu_s} s.
- CPU time of Postgres for a poll and a decision cycle: {database_cpu_s} s.
- Resident memory after the first, the middle and the last steady cycle: {memory} MB.
- A thread of its own renews the lease: after the slowest cycle ({slowest_cycle_wall_s} s) at least
  {least_lease_left_s} s
  of its 15 s were left. polluxd led under {epochs} epoch.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--cycles", type=int, default=60)
    parser.add_argument("--json", type=Path, default=Path("bench-out/scale.json"))
    parser.add_argument("--page", type=Path)
    parser.add_argument("--daemon", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.daemon:
        daemon(given.daemon)
        return 0
    found = summary(measure(given.jobs, given.cycles, given.nodes), given.jobs, given.nodes)
    missed = [key for key, aim in AIMS.items() if found[key] >= aim]
    save(given.json, found | {"missed": missed})
    print(json.dumps(found | {"missed": missed}, indent=1))
    if given.page:
        write_page(given.page, found | {"leave": round(CHURN * given.jobs)})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
