"""Measure the cost of each ending: steps, samples, seconds, processes.

    python -m tests.benchmarks.endings [--only ENDING[/TRAINING] ...] [--json FILE] [--markdown FILE]

With --only the rows are put into FILE beside those that are there: several such calls may run at the same time.

Each case starts a real training of two or three ranks over gloo, brings about the ending after some steps, starts the
training again where it ended, and lets it go on to its end. What the ranks wrote down then says what was lost:

- steps lost: completed optimizer steps that the next start did not have;
- samples lost, samples repeated: places in the data that no step of the final training took, and that two took;
- pause: the longest time without a step, where the same processes go on; from the last step before the ending to the
  first one after it, where Slurm's requeue does; otherwise from the ending's begin to the end of the last process;
- processes restarted: processes of the later start that took the place of ones that need not have ended.

For `disk full` no checkpoint can be written for a while. For `node lost` the launcher of one of three nodes is killed,
and its ranks with it; for `companion lost` that of a companion job. These nodes are launchers on this machine.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from unittest import mock

import contrib.devcluster.cluster as cluster_module
from contrib.commit import COMMIT
from contrib.devcluster import DevCluster
from tests.benchmarks.endings_training import EXAMPLES, PASSES
from tests.benchmarks.results import ROOT

SCRIPT = ROOT / "tests/benchmarks/endings_training.py"
PATIENCE = 240.0
TRAININGS = ("map", "stream", "fsdp2", "trainer", "lightning")
PRELOAD = {"trainer": ["--preload", "transformers.trainer"], "lightning": ["--preload", "lightning.pytorch"]}


@dataclass(frozen=True)
class Row:
    """One line of endings.json."""

    ending: str
    training: str
    steps_lost: int
    samples_lost: int
    samples_repeated: int
    pause_s: float
    processes_restarted: int
    commit: str


@dataclass
class Rank:
    """What one process wrote down."""

    begun_at: int
    """Optimizer step."""
    started: float
    passes: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(step, pass, first place, place after the last)."""
    done: dict[int, float] = field(default_factory=dict)
    """When each optimizer step was complete; POSIX seconds."""


def ranks(folder: Path) -> list[Rank]:
    """Read the files of all processes, the oldest first."""
    found = []
    for path in sorted(folder.glob("*.txt")):
        lines = [line.split() for line in path.read_text().split("\n")[:-1]]
        if not lines:
            continue
        rank = Rank(int(lines[0][1]), float(lines[0][2]))
        for kind, *words in lines[1:]:
            if kind == "done":
                rank.done[int(words[0])] = float(words[1])
            elif kind == "again":
                # A step that was taken again counts as it was at last.
                rank.passes = [taken for taken in rank.passes if taken[0] != int(words[0])]
            else:
                step, number, start, stop = map(int, words)
                rank.passes.append((step, number, start, stop))
        found.append(rank)
    return found


def judge(ending: str, training: str, folder: Path, begun: float, ended: float | None) -> Row:
    """Compare what the starts before and after the ending wrote down.

    `begun`: when the ending began. `ended`: when the last process was gone; None where the processes go on.
    """
    found = ranks(folder)
    first = [rank for rank in found if rank.started < begun]
    second = [rank for rank in found if rank.started >= begun]
    resumed = min((rank.begun_at for rank in second), default=sys.maxsize)
    before = {step for rank in first for step, at in rank.done.items()}
    undone = {step for step in before if step >= resumed}
    counts: Counter[tuple[int, int]] = Counter()
    repeated: Counter[tuple[int, int]] = Counter()
    for rank in found:
        for step, number, start, stop in rank.passes:
            places = [(number, place) for place in range(start, stop)]
            if step in rank.done and not (rank in first and step in undone):
                counts.update(places)
            if step in rank.done:
                repeated.update(places)
    complete = PASSES * EXAMPLES
    times = sorted(at for rank in found for at in rank.done.values())
    last = (
        max(at for at in times if at < (ended or begun)) if ended else max(at for at in times if at <= begun)
    )
    after = [at for at in times if at > (ended or begun)]
    gone_on = ended is None or "Slurm" in ending
    steps = [last, *after]
    if ended is None:  # a step may end between the ending's begin and its effect
        pause = max((later - earlier for earlier, later in pairwise(steps)), default=0.0)
    else:
        pause = (after[0] - last if after else 0.0) if gone_on else ended - begun
    return Row(
        ending.removesuffix(" (Slurm)"),
        training,
        len(undone),
        complete - len(counts),
        sum(n - 1 for n in repeated.values() if n > 1),
        round(pause, 2),
        len(second),
        COMMIT,
    )


# -- without Slurm ----------------------------------------------------------------------------------------------


class Run:
    """A `pollux run` on this machine."""

    def __init__(
        self, training: str, folder: Path, *, nproc: int = 2, script: str = str(SCRIPT), **environ: str
    ) -> None:
        self.folder = folder
        self._out = (folder / "out").open("ab")
        environ = {"POLLUX_CHECKPOINT_DIR": str(folder / "checkpoints"), **environ}
        self._command = ["--nproc", str(nproc), *PRELOAD.get(training, []), script, training, str(folder)]
        self.process = self.launch(self._command, environ)

    def launch(self, arguments: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a launcher."""
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "POLLUX"))}
        env = plain | {"PYTHONPATH": f"{ROOT}:{ROOT / 'agent'}", "CUDA_VISIBLE_DEVICES": ""} | environ
        command = [sys.executable, "-m", "pollux.launcher.launch", "run", *arguments]
        return subprocess.Popen(command, env=env, stdout=self._out, stderr=self._out)

    def steps(self, number: int) -> None:
        """Wait for so many steps of each rank."""

        def trained() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError((self.folder / "out").read_text()[-1500:])
            found = ranks(self.folder)
            return bool(found) and all(len(rank.done) >= number for rank in found)

        wait(trained, self.folder)

    def end(self) -> float:
        """Wait for its end; return when."""
        self.process.wait(PATIENCE)
        return time.time()

    def workers(self) -> list[int]:
        """Pids of the ranks, in order."""
        names = sorted(
            (p.name for p in self.folder.glob("*.txt")), key=lambda name: int(name.split("-")[2][:-4])
        )
        return [int(name.split("-")[1]) for name in names]


class Nodes(Run):
    """A step on several nodes: one launcher each, with `nproc` ranks."""

    def __init__(
        self,
        training: str,
        folder: Path,
        nodes: int,
        *,
        nproc: int = 1,
        script: str = str(SCRIPT),
        **environ: str,
    ) -> None:
        scontrol, sbatch = folder / "bin/scontrol", folder / "bin/sbatch"
        scontrol.parent.mkdir(exist_ok=True)
        scontrol.write_text("#!/bin/sh\necho NodeAddr=127.0.0.1\n")
        sbatch.write_text(f"#!/bin/sh\ncat > /dev/null\ntouch {folder}/submitted\necho 4711\n")
        for program in (scontrol, sbatch):
            program.chmod(0o755)
        self.shared = {
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "SLURM_JOB_ID": str(1 + time.time_ns() % (1 << 30)),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_NODES": str(nodes),
            "SLURM_STEP_NUM_TASKS": str(nodes),
            "SLURM_STEP_NODELIST": "n0",
            "POLLUX_LAUNCH_KEY": os.urandom(16).hex(),
            "POLLUX_EXCHANGE_INTERVAL": "0",
            **environ,
        }
        super().__init__(training, folder, nproc=nproc, script=script, **self.shared, **self.node(0))
        checkpoints = {"POLLUX_CHECKPOINT_DIR": str(folder / "checkpoints")}
        self.others = [
            self.launch(self._command, checkpoints | self.shared | self.node(number))
            for number in range(1, nodes)
        ]

    def companion(self, file: Path) -> subprocess.Popen[bytes]:
        """Start the launcher of a companion job on node c0."""
        own = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}
        own |= {"SLURMD_NODENAME": "c0", "SLURM_JOB_ID": "4711", "POLLUX_LAUNCH_KEY": os.urandom(16).hex()}
        return self.launch(["--companion", str(file)], self.shared | own)

    @staticmethod
    def node(number: int) -> dict[str, str]:
        return {"SLURM_NODEID": str(number), "SLURMD_NODENAME": f"n{number}"}

    def end(self) -> float:
        for launcher in (self.process, *self.others):
            launcher.wait(PATIENCE)
        return time.time()


def wait(done: Callable[[], object], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not done():
        if time.monotonic() > deadline:
            out = folder / "out"
            raise TimeoutError(out.read_text()[-2000:] if out.exists() else "nothing came")
        time.sleep(0.1)


def by_signal(number: signal.Signals, ending: str) -> Callable[[str, Path], Row]:
    def case(training: str, folder: Path) -> Row:
        run = Run(training, folder)
        run.steps(5)
        begun = time.time()
        # Slurm sends SIGUSR1 to every process of a step. The launcher passes on SIGTERM alone.
        for pid in run.workers() if number == signal.SIGUSR1 else [run.process.pid]:
            os.kill(pid, number)
        ended = run.end()
        Run(training, folder).end()
        return judge(ending, training, folder, begun, ended)

    return case


def rank_killed(training: str, folder: Path, rank: int = 2) -> Row:
    name = "rank killed" if rank else "rank 0 killed"
    run = Run(training, folder, nproc=3, POLLUX_CHECKPOINT_INTERVAL="2")
    run.steps(5)
    begun = time.time()
    os.kill(run.workers()[rank], signal.SIGKILL)
    run.process.wait(PATIENCE)
    if run.process.returncode == 0:
        return judge(name, training, folder, begun, None)
    ended = time.time()
    Run(training, folder).end()
    return judge(name, training, folder, begun, ended)


def rank_0_killed(training: str, folder: Path) -> Row:
    return rank_killed(training, folder, 0)


def node_lost(training: str, folder: Path) -> Row:
    run = Nodes(training, folder, 3, POLLUX_CHECKPOINT_INTERVAL="2")
    run.steps(5)
    begun = time.time()
    run.others[1].kill()
    ended = run.end()
    if run.process.returncode == 0:
        return judge("node lost", training, folder, begun, None)
    Nodes(training, folder, 3).end()
    return judge("node lost", training, folder, begun, ended)


def companion_lost(training: str, folder: Path) -> Row:
    run = Nodes(training, folder, 1, nproc=2, ENDINGS_GROW="n0 c0")
    wait((folder / "submitted").exists, folder)
    companion = run.companion(folder / "checkpoints/companion-1.json")
    wait(lambda: len(ranks(folder)) == 4, folder)
    run.steps(5)
    begun = time.time()
    companion.kill()
    companion.wait()
    run.end()
    if run.process.returncode:
        raise RuntimeError((folder / "out").read_text()[-2000:])
    return judge("companion lost", training, folder, begun, None)


def disk_full(training: str, folder: Path) -> Row:
    """Checkpoints are due every second; for a while none can be written."""
    place = folder / "checkpoints"
    run = Run(training, folder, POLLUX_CHECKPOINT_INTERVAL="1")
    run.steps(5)
    wait(place.exists, folder)
    begun = time.time()
    place.rename(folder / "away")
    place.write_text("no folder can be made here")
    time.sleep(2.5)
    place.unlink()
    (folder / "away").rename(place)
    run.process.wait(PATIENCE)
    if run.process.returncode:
        raise RuntimeError((folder / "out").read_text()[-2000:])
    return judge("disk full", training, folder, begun, None)


# -- under Slurm --------------------------------------------------------------------------------------------------


@contextmanager
def slurm() -> Iterator[DevCluster]:
    """A cluster whose partition `main` is preempted by `high`, with GraceTime."""
    made = cluster_module.slurm_conf

    def conf(*arguments: object) -> str:
        text = made(*arguments)  # type: ignore[arg-type]
        text = re.sub(
            r"(?m)^(PartitionName|JobSubmitPlugins|CliFilterPlugins|Prolog|Epilog|TaskProlog).*\n", "", text
        )
        text = text.replace("KillWait=5", "KillWait=30").replace("AuthInfo=", "AuthInfo=cred_expire=5,")
        return text + (
            "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
            "PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=30 PreemptMode=REQUEUE\n"
            "PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF\n"
        )

    with (
        tempfile.TemporaryDirectory(prefix="endings-") as folder,
        mock.patch.object(cluster_module, "slurm_conf", conf),
    ):
        Path(folder).chmod(0o755)  # munge wants it
        with DevCluster(Path(folder) / "cluster", nodes=NODES, gpus_per_node=2, postgres=False) as cluster:
            yield cluster


def under_slurm(cluster: DevCluster, node: str, ending: str, training: str, folder: Path) -> Row:
    """Train as a job of its own on one node of the cluster."""
    script = folder / "job.sh"
    script.write_text(
        "#!/bin/bash\n"
        f"export PYTHONPATH={ROOT}:{ROOT / 'agent'} POLLUX_CHECKPOINT_DIR={folder}/checkpoints\n"
        f"export POLLUX_CONTINUE={'yes' if ending == 'time limit' else 'no'}\n"
        f"export ENDINGS_PAUSE={1.0 if ending == 'time limit' else 0.08}\n"
        f"{sys.executable} -m pollux.launcher.launch run --nproc 2 {' '.join(PRELOAD.get(training, []))} "
        f"{SCRIPT} {training} {folder}\n"
    )
    place = ["--exclusive", f"--nodelist={node}"]
    more = ["--time=1"] if ending == "time limit" else []

    def submit() -> str:
        words = ["--parsable", "--open-mode=append", f"--output={folder}/out", *place, *more]
        return cluster.command("sbatch", *words, str(script)).strip()

    def state(job: str) -> str:
        shown = re.search(r"JobState=(\w+)", cluster.command("scontrol", "show", "job", job))
        return shown.group(1) if shown else ""

    job = submit()
    wait(lambda: len(found := ranks(folder)) == 2 and all(len(r.done) >= 5 for r in found), folder)
    begun = time.time()
    if ending == "scancel":
        cluster.command("scancel", job)
    elif ending == "preemption":
        cluster.command("sbatch", "--partition=high", *place, "--wrap", "sleep 2", "--output=/dev/null")
    else:
        wait(lambda: state(job) != "RUNNING", folder)
    over = ("CANCELLED",) if ending == "scancel" else ("PENDING", "COMPLETING")
    wait(lambda: state(job) in over, folder)
    ended = time.time()
    if ending == "scancel":
        job = submit()
    wait(lambda: state(job) == "COMPLETED", folder)
    name = ending if ending == "scancel" else f"{ending} (Slurm)"
    return judge(name, training, folder, begun, ended)


Case = Callable[[str, Path], Row]

PLAIN: dict[str, Case] = {
    "SIGTERM": by_signal(signal.SIGTERM, "SIGTERM"),
    "SIGUSR1": by_signal(signal.SIGUSR1, "SIGUSR1"),
    "disk full": disk_full,
    "rank killed": rank_killed,
    "rank 0 killed": rank_0_killed,
    "node lost": node_lost,
    "companion lost": companion_lost,
}
SLURM = ("time limit", "preemption", "scancel")
ENDINGS = (
    *("SIGTERM", "SIGUSR1", "time limit", "preemption", "scancel", "disk full"),
    *("rank killed", "rank 0 killed", "node lost", "companion lost"),
)
CELLS = [
    (ending, training)
    for ending in ENDINGS
    for training in TRAININGS
    # The other trainings have no companions.
    if ending != "companion lost" or training in ("map", "stream", "fsdp2", "trainer")
]
NODES = 5
"""Of the private Slurm: as many jobs are measured there at the same time."""


REASONS = (
    "The pause of SIGTERM, SIGUSR1 and `scancel` runs from the signal to the end of the last process, that of a time",
    "limit and of preemption to the first step of the next attempt: it holds the other job and the wait in the queue.",
    "The restarted processes are the next start's. Five jobs ran under Slurm at the same time.",
    "",
    "Trainer runs with `--preload transformers.trainer`, Lightning with `--preload lightning.pytorch`.",
    "",
    "A killed rank or a lost node ends all ranks. New ranks restore the newest copy of the state in memory.",
    "Under FSDP2 the shards of a lost node are lost: its row is restored from a checkpoint's file, written every 2 s.",
    "",
    "Lightning is not resized in place, so it has no companions: companion lost/lightning does not exist. Where node 0",
    "is lost, Slurm ends the job: its batch script runs there.",
)


def page(rows: list[Row]) -> str:
    lines = [
        "# Endings",
        "",
        "What an ending costs a training: `make bench-endings`. Real trainings over gloo, on two cores; under a",
        "private Slurm 22.05 where the ending is Slurm's. `tests/benchmarks/endings.py` says what each column means.",
        "",
        "| ending | training | steps lost | samples lost | samples repeated | pause [s] | processes restarted |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.ending} | {r.training} | {r.steps_lost} | {r.samples_lost} | {r.samples_repeated} | {r.pause_s:.1f} | "
        f"{r.processes_restarted} |"
        for r in rows
    ]
    measured = {(r.ending, r.training) for r in rows}
    missing = ["/".join(cell) for cell in CELLS if cell not in measured]
    if missing:
        lines += ["", f"Not measured: {', '.join(missing)}."]
    by_commit: dict[str, list[str]] = {}
    for row in rows:
        by_commit.setdefault(row.commit, []).append(f"{row.ending}/{row.training}")
    found = sorted(by_commit.items(), key=lambda item: -len(item[1]))
    said = [f"Measured at commit {found[0][0]}"] if found else []
    said += [f"at {name} {', '.join(cells)}" for name, cells in found[1:]]
    return "\n".join([*lines, "", *REASONS, "", "; ".join(said) + ".", ""])


def keep(row: Row, file: Path) -> None:
    """Put a row into the file, in the place of the one that it may have had."""
    with file.open("a+") as rows:
        fcntl.flock(rows, fcntl.LOCK_EX)
        rows.seek(0)
        known = [Row(**raw) for raw in json.loads(rows.read() or "[]")]
        known = [r for r in known if (r.ending, r.training) != (row.ending, row.training)] + [row]
        rows.truncate(0)
        rows.write(json.dumps([asdict(r) for r in known], indent=2) + "\n")


def measure(case: Case, ending: str, training: str, file: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="endings-") as folder:
        Path(folder).chmod(0o755)
        try:
            row = case(training, Path(folder))
        except Exception as error:
            print(f"{ending}/{training}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return
    print(row, flush=True)
    keep(row, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="ENDING[/TRAINING]")
    parser.add_argument("--json", type=Path, default=Path("bench-out/endings.json"))
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    arguments.json.parent.mkdir(exist_ok=True)
    if not arguments.only:
        arguments.json.unlink(missing_ok=True)
    wanted = [cell for cell in CELLS if not arguments.only or {cell[0], "/".join(cell)} & set(arguments.only)]
    for ending, training in wanted:
        if ending in PLAIN:
            measure(PLAIN[ending], ending, training, arguments.json)
    if any(ending in SLURM for ending, _ in wanted):
        with slurm() as cluster:
            left = queue.SimpleQueue[tuple[str, str]]()
            for cell in wanted:
                if cell[0] in SLURM:
                    left.put(cell)

            def work(node: str) -> None:
                while True:
                    try:
                        ending, training = left.get_nowait()
                    except queue.Empty:
                        return
                    case = functools.partial(under_slurm, cluster, node, ending)
                    measure(case, ending, training, arguments.json)

            with ThreadPoolExecutor(NODES) as pool:
                list(pool.map(work, (f"n{number}" for number in range(1, NODES + 1))))
    known = [Row(**raw) for raw in json.loads(arguments.json.read_text())]
    if arguments.markdown:
        arguments.markdown.write_text(page(sorted(known, key=lambda r: CELLS.index((r.ending, r.training)))))


if __name__ == "__main__":
    main()
