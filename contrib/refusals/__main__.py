"""Play each row beside polluxd and without it; write bench-out/refusals.json, and the page.

python -m contrib.refusals [--only WORD ...] [--out FILE] [--page FILE]

Ten rows are played at the same time, on partitions of their own. `scontrol show job`, twice a second, says when each
training ran, on how many GPUs, and how often it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path

from contrib.commit import COMMIT
from contrib.devcluster import DevClusterError, Polluxd, SiteLines
from contrib.devcluster.cluster import slurm_version
from contrib.devcluster.interrupts import interruptible
from contrib.refusals.causes import ROWS, Row, nothing
from contrib.refusals.page import page
from contrib.sites.place import USER, Place, place
from polluxd.printable import printable

SINGLE, DOUBLE = 8, 3
"""Partitions of one node, and of two."""
WATCHED_S = 35.0
"""Two cooldowns, some decisions, and a move that comes to nothing."""
GROWN_S = 90.0
FIRST_S = 90.0
PAUSE_S = 5.0
"""Between two steps, beyond which a job that holds its GPUs does not train."""
_TRAINER = "python tests/integration/loop/own_loop.py"
_RUNNING = ("RUNNING",)


def _partitions() -> dict[str, tuple[str, ...]]:
    names = iter(f"n{number}" for number in count(1))
    sizes = [*(("s", 1, n) for n in range(SINGLE)), *(("d", 2, n) for n in range(DOUBLE))]
    return {f"{kind}{n}": tuple(next(names) for _ in range(size)) for kind, size, n in sizes}


PARTITIONS = _partitions()
WANTED = [
    *((row.act, row.cause) for row in ROWS),
    *(("start", row.cause) for row in ROWS if row.act == "grow"),
]
SITE = SiteLines(
    lines=(
        "SelectTypeParameters=CR_Core_Memory",
        "DefMemPerGPU=400",
        "AccountingStorageEnforce=associations,limits,qos,safe",
        "AccountingStorageTRES=gres/gpu",
        "Licenses=matlab:1",
        "ReconfigFlags=KeepPartState",
        "RebootProgram=/bin/true",
    ),
    nodes={node: "Feature=ib" for nodes in PARTITIONS.values() for node in nodes},
    partitions={
        name: f"Nodes={','.join(nodes)} TRESBillingWeights=GRES/gpu=1.0" for name, nodes in PARTITIONS.items()
    },
)


@dataclass
class Watched:
    """What Slurm showed of a job."""

    submitted: float = field(default_factory=time.time)
    started: float | None = None
    since: float | None = None
    """When the watch began; before, only the start counts."""
    stopped_s: float = 0.0
    restarts: int = 0
    restarted_at: list[float] = field(default_factory=list)
    """Since the watch began."""
    stops: int = 0
    """Restarts of attempts that had made a step."""
    gpus: int = 0
    state: str = ""
    seen_at: float = 0.0

    ended: bool = False

    def end(self, stepped_at: Sequence[float]) -> None:
        """What comes after is no part of the row; `stepped_at`: when the trainer made its steps."""
        self.ended = True
        begun = 0.0
        for at in self.restarted_at:
            self.stops += any(begun < step <= at for step in stepped_at)
            begun = at
        end = [self.seen_at] if self.state in _RUNNING else []
        steps = [self.since or 0.0, *(at for at in stepped_at if self.since and at > self.since), *end]
        longest = max((after - before for before, after in pairwise(steps)), default=0.0)
        if self.since and longest > PAUSE_S:
            self.stopped_s = max(self.stopped_s, longest)

    def see(self, record: str, now: float) -> None:
        """Take in a line of `scontrol show job`."""
        if self.ended:
            return
        words = dict(word.split("=", 1) for word in record.split() if "=" in word)
        self.state, restarts = words.get("JobState", ""), int(words.get("Restarts", "0"))
        if self.since is not None and restarts > self.restarts:
            self.restarted_at.append(now)
        self.restarts = restarts
        runs = self.state in _RUNNING
        found = re.search(r"[ ,=]gres/gpu=(\d+)", record[record.find(" TRES=") :])
        self.gpus = int(found[1]) if runs and found else 0
        if runs and self.started is None:
            self.started = now
        if self.since is not None and not runs and self.state in ("PENDING", "COMPLETING"):
            self.stopped_s += now - max(self.seen_at, self.since)
        self.seen_at = now


class Sampler(threading.Thread):
    """Looks at all jobs of a cluster, twice a second."""

    def __init__(self, site: Place) -> None:
        super().__init__(daemon=True)
        self._site = site
        self._ended = threading.Event()
        self.jobs: dict[int, Watched] = {}

    def run(self) -> None:
        while not self._ended.wait(0.5):
            try:
                shown = self._site.cluster.command("scontrol", "show", "job", "-o")
            except DevClusterError:
                continue  # slurmctld restarts
            now = time.time()
            for line in shown.splitlines():
                number = re.match(r"JobId=(\d+)", line)
                if number and (watched := self.jobs.get(int(number[1]))) is not None:
                    watched.see(line, now)

    def end(self) -> None:
        self._ended.set()
        self.join()


class Play:
    """One row on one cluster: the `Hands` of its cause."""

    def __init__(self, site: Place, sampler: Sampler, row: Row, number: int, partition: str) -> None:
        self._site, self._sampler, self._row = site, sampler, row
        self.partition, self.nodes = partition, PARTITIONS[partition]
        self.account, self._name = f"a{number}", f"r{number}"
        self.beside = site.daemon.running
        self.job_id = 0
        self.error = ""

    def command(self, *words: str) -> str:
        return self._site.cluster.command(*words)

    def update(self, *words: str) -> None:
        self.command("scontrol", "update", *words)

    def submit(self, name: str, *lines: str, gpus: int = 0) -> int:
        head = "SBATCH --nodes=1" + (f" --gpus-per-node={gpus}" if gpus else " --mem=100")
        own = (f"SBATCH --partition={self.partition} --account={self.account}", *lines)
        return self._site.sbatch(f"{self._name}-{name}", "sleep 300", *own, head=head)

    def lock_checkpoints(self) -> None:
        self._out.chmod(0o555)

    @property
    def _out(self) -> Path:
        return self._site.folder / self._name

    def prepare(self) -> None:
        """Make the row's QOS and account."""
        row, qos = self._row, f"q{self._row_number}"
        self.command("sacctmgr", "-i", "add", "qos", qos, *row.qos)
        words = (f"qos={qos}", f"defaultqos={qos}", *row.account)
        self.command("sacctmgr", "-i", "add", "account", self.account, *words)
        self.command("sacctmgr", "-i", "add", "user", USER, f"account={self.account}", *row.user)

    @property
    def _row_number(self) -> str:
        return self._name[1:]

    def play(self) -> Watched:
        row = self._row
        try:
            row.before(self)
            watched = self._submit()
            self._watch(watched)
        except Exception as error:
            traceback.print_exc()
            self.error = f"{type(error).__name__}: {error}"
            watched = self._sampler.jobs.get(self.job_id, Watched())
        watched.end([at for at, _ in self._steps()])
        self.told = self._told()
        self._clean()
        return watched

    def _steps(self) -> list[tuple[float, int]]:
        """When the trainer made each step, and on how many GPUs."""
        made = self._out / "made.txt"
        words = [line.split() for line in made.read_text().splitlines()] if made.exists() else []
        return [(float(at), int(gpus)) for _, gpus, at in (one for one in words if len(one) == 3)]

    def _submit(self) -> Watched:
        row, gpus = self._row, self._row.gpus
        counts = "2,4" if row.nodes == 1 else "4,8"
        head = f"SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node={gpus if row.nodes == 1 else 4}"
        lines = [line.format(last=self.nodes[-1]) for line in row.lines]
        least, most = counts.split(",")
        own = (
            f"SBATCH --partition={self.partition} --account={self.account}",
            f"POLLUX min-gpus={least} max-gpus={most} gpu-counts={counts} adaptive=no resize=requeue",
        )
        body = (
            f"pollux wrap --checkpoints '{self._out}/step-*.json' --batch 48 --steps 100000 {row.wrap} -- "
            f"{_TRAINER} --out {self._out} --steps 100000 {row.trainer}"
        )
        self.job_id = self._site.sbatch(self._name, body, *own, *lines, head=head)
        watched = self._sampler.jobs[self.job_id] = Watched()
        return watched

    def _trains(self) -> bool:
        """Whether it has made a step, which polluxd knows: before, no move of it is ever tried."""
        return (self._out / "made.txt").exists() and (not self.beside or self._site.trains(self.job_id))

    def _watch(self, watched: Watched) -> None:
        row = self._row
        deadline = time.time() + FIRST_S
        while not (watched.started and self._trains()) and time.time() < deadline:
            time.sleep(0.2)
        if not self._trains():
            raise TimeoutError(f"no first step within {FIRST_S:.0f} s: {self._told()}")
        if row.during is not nothing and row.act == "grow":
            self._pin(True)
        if row.act == "shrink" and self.beside:
            self._until_grown(watched)
            self._pin(True)
        watched.since = time.time()
        row.during(self)
        self._pin(False)
        longest = GROWN_S if row.grows else WATCHED_S
        while time.time() < watched.since + longest and not (row.grows and watched.gpus == 4):
            time.sleep(0.2)

    def _until_grown(self, watched: Watched) -> None:
        deadline = time.time() + GROWN_S
        while time.time() < deadline and not (
            watched.gpus >= 4 and [gpus for _, gpus in self._steps()[-1:]] == [4]
        ):
            time.sleep(0.2)

    def _pin(self, on: bool) -> None:
        """Keep polluxd from moving it before the cause is there."""
        if not self.beside:
            return
        self._site.store.set_pin(self.job_id, "by the row", pinned=on)

    def _told(self) -> str:
        if not self.beside or not self.job_id:
            return ""
        found = self._site.store.explain(self.job_id)
        return found.allocation.reason if found is not None and found.allocation is not None else ""

    def _clean(self) -> None:
        """End the row's jobs, and undo what it did to its nodes and partition."""
        with suppress(DevClusterError):
            self.command("scancel", f"--partition={self.partition}")
        undo = (
            ("scontrol", "update", f"PartitionName={self.partition}", "State=UP", "MaxNodes=UNLIMITED"),
            (
                "scontrol",
                "update",
                f"PartitionName={self.partition}",
                "MaxTime=UNLIMITED",
                "AllowAccounts=ALL",
            ),
            ("scontrol", "update", f"PartitionName={self.partition}", "AllowQos=ALL", "OverSubscribe=NO"),
            ("scontrol", "delete", f"ReservationName=r_{self.partition}_{self.account}"),
            *(("scontrol", "cancel_reboot", node) for node in self.nodes[:1]),
            *(("scontrol", "update", f"NodeName={node}", "State=RESUME") for node in self.nodes),
            *(
                ("scontrol", "update", f"NodeName={node}", "AvailableFeatures=ib", "ActiveFeatures=ib")
                for node in self.nodes
            ),
        )
        for words in undo:
            with suppress(DevClusterError):
                self.command(*words)
        deadline = time.time() + 30
        while time.time() < deadline:
            with suppress(DevClusterError):
                if not self.command("squeue", "-h", "-a", "-p", self.partition).strip():
                    return
            time.sleep(0.5)


def row_of(row: Row, beside: tuple[Play, Watched], control: tuple[Play, Watched]) -> list[dict[str, object]]:
    """Return the results of a row: those of its act, and of its first start."""
    (play, here), (_, there) = beside, control
    known = {
        "cause": row.cause,
        "slurm": ".".join(map(str, slurm_version())),
        "told": printable(play.told),
        "error": printable(play.error),
        "commit": COMMIT,
    }
    both = {"final_gpus": here.gpus, "control_final_gpus": there.gpus}
    acted = {
        "act": row.act,
        "stopped_s": round(here.stopped_s, 1),
        "control_stopped_s": round(there.stopped_s, 1),
        "stops": here.stops,
        "control_stops": there.stops,
        "lost_gpu_s": round(here.stopped_s * (4 if row.act == "shrink" else 2), 1),
    }
    if row.act != "grow":
        return [known | acted | both]
    first = {
        "act": "start",
        "stopped_s": round(_start_s(here), 1),
        "control_stopped_s": round(_start_s(there), 1),
        "stops": 0 if here.started else here.restarts,
        "control_stops": 0,
        "lost_gpu_s": 0.0,
    }
    return [known | acted | both, known | first | both]


def _start_s(watched: Watched) -> float:
    return (watched.started or time.time()) - watched.submitted


def play_rows(
    rows: Sequence[tuple[int, Row]], out: Path, kept: Iterable[dict[str, object]] = ()
) -> list[dict[str, object]]:
    """Play the rows in batches, one for each partition; return their results and those that are `kept`."""
    found = list(kept)
    with (
        place(SITE, (), nodes=SINGLE + 2 * DOUBLE, lease_s=20) as control,
        place(SITE, (), nodes=SINGLE + 2 * DOUBLE, lease_s=20) as site,
        ExitStack() as stack,
    ):
        site.daemon = Polluxd(
            site.cluster,
            site.folder,
            slurm={"lease_s": 20},
            moves={"own_loop_rest": 0},
            policy={"start_gpus": 1},
        )
        site.start()
        samplers = {}
        for each in (control, site):
            refuse_updates(each, {f"a{number}": row.hook for number, row in rows if row.hook})
            samplers[id(each)] = Sampler(each)
            samplers[id(each)].start()
            stack.callback(samplers[id(each)].end)
        left = list(rows)
        while left:
            batch, left = _batch(left)
            with ThreadPoolExecutor(2 * len(batch)) as pool:
                plays = {
                    (number, beside): Play(each, samplers[id(each)], row, number, partition)
                    for number, row, partition in batch
                    for each, beside in ((site, True), (control, False))
                }
                for one in plays.values():
                    one.prepare()
                time.sleep(1.0)
                ended = {key: pool.submit(one.play) for key, one in plays.items()}
                for number, row, _ in batch:
                    both = [
                        (plays[number, beside], ended[number, beside].result()) for beside in (True, False)
                    ]
                    found += row_of(row, both[0], both[1])
                    out.write_text(json.dumps(found, indent=1) + "\n")
                    told = found[-1] if row.act != "grow" else found[-2]
                    print(f"{row.act:7}{row.cause}: {told}", flush=True)
        folders = [each.folder.parent for each in (control, site)]
        log = (site.folder / "polluxd.log").read_text()
        if "Traceback" in log:
            print(f"polluxd had a fault of its own: {site.folder}/polluxd.log", file=sys.stderr)
            folders = []
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def refuse_updates(site: Place, conditions: Mapping[str, str]) -> None:
    """Append a site's own rule to its hook: by account, which updates of a job it refuses, as conditions in Lua."""
    script = site.cluster.slurm_conf.with_name("job_submit.lua")
    refused = " or ".join(f'(job.account == "{account}" and {when})' for account, when in conditions.items())
    at = script.stat().st_mtime + 2  # slurmctld looks at whole seconds
    script.write_text(f"""{script.read_text()}
local pollux_modify = slurm_job_modify
function slurm_job_modify(desc, job, part, uid)
   if {refused or "false"} then
      return slurm.ERROR
   end
   return pollux_modify and pollux_modify(desc, job, part, uid) or slurm.SUCCESS
end
""")
    os.utime(script, (at, at))


def _batch(rows: Iterable[tuple[int, Row]]) -> tuple[list[tuple[int, Row, str]], list[tuple[int, Row]]]:
    free = {1: [n for n in PARTITIONS if n[0] == "s"], 2: [n for n in PARTITIONS if n[0] == "d"]}
    chosen, left = [], []
    for number, row in rows:
        if free[row.nodes]:
            chosen.append((number, row, free[row.nodes].pop()))
        else:
            left.append((number, row))
    return chosen, left


def wrong(rows: Sequence[dict[str, object]]) -> list[str]:
    """Return which rows stop a training twice or for longer than 10 s, or delay a start by more than 15 s."""
    found = []
    for row in rows:
        name = f"{row['act']} {row['cause']}"
        stopped, control = float(str(row["stopped_s"])), float(str(row["control_stopped_s"]))
        if row["error"]:
            found.append(f"{name}: {row['error']}")
        elif row["act"] == "start" and stopped > control + 15.0:
            found.append(f"{name}: {stopped:.0f} s, without polluxd {control:.0f} s")
        elif row["act"] != "start" and row["cause"] == "none":
            if row["final_gpus"] != 4:
                found.append(f"{name}: it did not grow")
        elif (
            row["act"] != "start"
            and not row["control_stops"]
            and (int(str(row["stops"])) > 1 or stopped > 10.0)
        ):
            found.append(f"{name}: {row['stops']} stops, {stopped:.0f} s")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m contrib.refusals", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--only", nargs="+", default=[""], help="rows with one of these words in their cause")
    parser.add_argument("--act", default="", help="grow or shrink")
    parser.add_argument("--out", type=Path, default=Path("bench-out/refusals.json"))
    parser.add_argument(
        "--keep", action="store_true", help="keep the rows of --out that are not played again"
    )
    parser.add_argument("--page", type=Path, help="page that is written")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    chosen = [
        (number, row)
        for number, row in enumerate(ROWS)
        if any(word in row.cause for word in arguments.only) and arguments.act in row.act
    ]
    played = {(row.act, row.cause) for _, row in chosen}
    played |= {("start", cause) for act, cause in played if act == "grow"}
    known = json.loads(arguments.out.read_text()) if arguments.keep and arguments.out.exists() else []
    kept = [row for row in known if (row["act"], row["cause"]) in set(WANTED) - played]
    rows = play_rows(chosen, arguments.out, kept)
    if arguments.page is not None:
        arguments.page.write_text(page(rows, ", ".join(sorted({str(row["commit"]) for row in rows})), WANTED))
    failed = wrong(rows)
    for one in failed:
        print(f"refusals: {one}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    with interruptible():
        sys.exit(main())
