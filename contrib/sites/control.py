"""Play a drawn site twice: without polluxd, and beside it.

Both runs are made at the same time, on two clusters, and measured by squeue and scontrol alone. No job may be lost
beside polluxd, and none may wait longer than without it, unless polluxd says why.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contrib.devcluster import DevClusterError
from contrib.devcluster.polluxd import idle_notes, lost_gpu_s
from contrib.devcluster.processes import program
from contrib.sites.generated import STREAM_S, Act, DrawnSite, draw
from contrib.sites.idle import Measured
from contrib.sites.place import Place, place
from polluxd.printable import printable

LEASE_S = 20
TOLERANCE_S = 25.0
"""A cycle of 5 s, a lease, a slow scheduler, and the same on a busy machine."""
_END_S = 240.0
_REBOOT_S = 90.0
"""Longest wait for the end of the jobs on a node that is to reboot."""
_NO_CAUSE = re.compile(r"do not form such a placement|worth more elsewhere|takes no part|^$")
"""Reasons that explain no wait beside idle GPUs."""
_EXPLAINED_AFTER_S = 8.0
"""A wait so long is worth asking polluxd for its reason."""


@dataclass
class Run:
    """What one run of a stream came to."""

    idle: Measured
    waits: dict[str, float] = field(default_factory=dict)
    """Seconds from the submission to the first start, by job."""
    ids: dict[str, int] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    idle_s: dict[str, float] = field(default_factory=dict)
    """Seconds in which the job waited beside GPUs that it could use."""
    reasons: dict[str, str] = field(default_factory=dict)
    """polluxd's reason while the job waited beside idle GPUs, or at last."""
    lost_gpu_s: float = 0.0
    """For which running jobs stood because of moves that came to nothing."""


def play(seed: int) -> dict[str, object]:
    """Play the site of a seed; return the row of the results."""
    drawn, started = draw(seed), time.time()
    slurm = subprocess.run([program("slurmctld"), "-V"], capture_output=True, text=True, check=True).stdout
    row: dict[str, object] = {
        "case": f"generated site {seed}",
        "seed": seed,
        "slurm": slurm.split()[-1],
        "jobs": len(drawn.jobs),
        "site": drawn.words,
    }
    folders: list[Path] = []
    try:
        without, beside, wrong = _both(drawn, folders)
    except Exception as error:
        traceback.print_exc()
        wrong = [f"{type(error).__name__}: {error}"]
    else:
        extra = {name: wait - without.waits.get(name, wait) for name, wait in beside.waits.items()}
        longest = max(extra, key=extra.__getitem__, default="")
        idle_s = beside.idle_s.get(longest, 0.0) - without.idle_s.get(longest, 0.0)
        row |= {
            "idle_gpu_s_beside_waiting": round(beside.idle.gpu_s, 1),
            "idle_gpu_s_in_control": round(without.idle.gpu_s, 1),
            "lost_gpu_s": beside.lost_gpu_s,
            "longest_extra_wait_s": round(extra.get(longest, 0.0), 1),
            "of_job": f"{longest}, {idle_s:.0f} s of it beside idle GPUs: {printable(beside.reasons.get(longest, ''))}",
        }
    if not wrong:
        for folder in folders:
            shutil.rmtree(folder)
    return row | {
        "result": "failed" if wrong else "ok",
        "what_the_user_saw": printable("; ".join(wrong) or "no job waited longer or was lost"),
        "seconds": round(time.time() - started, 1),
        "folder": " ".join(map(str, folders)) if wrong else "",
    }


def _both(drawn: DrawnSite, folders: list[Path]) -> tuple[Run, Run, list[str]]:
    """Play a site without polluxd and beside it, at the same time on two clusters; return what polluxd made worse."""
    # The clusters end before the pool: where this run fails, the other one's commands fail too, and its thread ends.
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:

        def bring_up(_: int) -> Place:
            site = stack.enter_context(
                place(
                    drawn.site,
                    drawn.accounts,
                    nodes=drawn.nodes,
                    gpus_per_node=drawn.gpus_per_node,
                    lease_s=LEASE_S,
                )
            )
            folders.append(site.folder.parent)
            site.idle.start()
            return site

        control, site = pool.map(bring_up, range(2))
        site.start()
        since = time.time()
        plain = pool.submit(_run, control, drawn, beside=False)
        beside = _run(site, drawn, beside=True)
        beside.lost_gpu_s = lost_gpu_s(site.store.moves())
        without = plain.result()
        wrong = compare(drawn, without, beside)
        notes = [n for n in idle_notes(site.store, since) if not never_runs(n, without, beside)]
        wrong += [f"polluxd's own watch: {note}" for note in notes[-1:]]
        log = (site.folder / "polluxd.log").read_text()
        wrong += ["polluxd had a fault of its own"] if "Traceback" in log else []
        return without, beside, wrong


def compare(drawn: DrawnSite, without: Run, beside: Run) -> list[str]:
    """Return what polluxd made worse, in words."""
    wrong = (
        [] if without.waits else [f"nothing ran without polluxd: {next(iter(without.reasons.values()), '')}"]
    )
    for job in drawn.jobs:
        name = job.name
        if any("#POLLUX" in run.reasons.get(name, "") for run in (without, beside)):
            continue  # the hook, which the control has too, refuses an option that no move can keep
        if beside.ends.get(name) != without.ends.get(name) and without.ends.get(name) in (
            "COMPLETED",
            "refused",
        ):
            wrong.append(
                f"{name} ({_words(job.lines)}): {beside.ends.get(name)}, without polluxd {without.ends[name]}"
            )
            continue
        extra = beside.waits.get(name, 0.0) - without.waits.get(name, 0.0)
        if name not in without.waits or extra <= TOLERANCE_S:
            continue
        idle = beside.idle_s.get(name, 0.0) - without.idle_s.get(name, 0.0)
        reason = beside.reasons.get(name, "")
        if idle > TOLERANCE_S:
            unexplained = _NO_CAUSE.search(reason)
        else:  # others had the GPUs; polluxd has no reason for plain jobs
            unexplained = not reason and (job.pollux or extra > 2 * TOLERANCE_S)
        if unexplained:
            wrong.append(
                f"{name} ({_words(job.lines)}) waited {extra:.0f} s longer, {idle:.0f} s of them beside idle GPUs; "
                f"polluxd's reason: {reason!r}"
            )
    return wrong


def never_runs(note: str, without: Run, beside: Run) -> bool:
    """Tell whether the one job that a note of the watch is about does not start without polluxd either.

    Slurm 22.05 can lose count of typed GPUs when slurmctld restarts. Jobs then wait beside free GPUs for good.
    """
    number = re.search(r"GPUs that job (\d+) may use", note)
    names = [name for name, job_id in beside.ids.items() if number and job_id == int(number[1])]
    alone = "more jobs wait so" not in note
    return alone and bool(names) and without.waits.keys().isdisjoint(names)


def _words(lines: tuple[str, ...]) -> str:
    return ", ".join(lines)


def _run(site: Place, drawn: DrawnSite, *, beside: bool) -> Run:
    """Submit the stream, act, and wait for all jobs to end."""
    site.idle.restart()
    run = Run(site.idle.measured)
    began, ids, submitted = time.monotonic(), run.ids, dict[str, float]()
    todo: list[tuple[float, Callable[[], object]]] = []

    def submit(job: Any) -> None:
        submitted[job.name] = time.monotonic()
        try:
            ids[job.name] = site.sbatch(job.name, job.body, *job.lines, head=job.head, wish=job.wish)
        except RuntimeError as error:
            run.ends[job.name] = "refused"
            run.reasons[job.name] = str(error)

    todo += [(job.at, lambda job=job: submit(job)) for job in drawn.jobs]
    acts, slow = Acts(site, ids, beside=beside), list[Future[None]]()

    def by(do: Callable[[Act], None], act: Act) -> None:
        if hand := daemons if act.kind in POLLUXD else nodes if act.kind == "reboot" else None:
            slow.append(hand.submit(do, act))
        else:
            do(act)

    # Acts on polluxd take long, and the control has none; a reboot waits for the node's jobs. Threads of their own keep
    # the other acts' times the same.
    with ThreadPoolExecutor(1) as daemons, ThreadPoolExecutor(1) as nodes:
        for act in drawn.acts:
            todo += [
                (act.at + later, lambda act=act, do=do: by(do, act))
                for do, later in ((acts.do, 0.0), (acts.undo, act.seconds))
            ]
        for at, do in sorted(todo, key=lambda one: one[0]):
            time.sleep(max(0.0, began + at - time.monotonic()))
            do()
            _ask(site, run, ids, submitted, beside=beside)
    for one in slow:
        one.result()
    deadline = began + STREAM_S + _END_S
    while time.monotonic() < deadline and not site.ended(ids.values()):
        time.sleep(1.0)
        _ask(site, run, ids, submitted, beside=beside)
    states, first = site.states(), site.idle.measured.first_runs
    for name, job_id in ids.items():
        if job_id in first:
            run.waits[name] = first[job_id] - submitted[name]
        run.ends[name] = "; ".join(sorted(states.get(job_id, {"unknown"})))
        run.idle_s[name] = run.idle.idle_s.get(job_id, 0.0)
    site.idle.restart()
    site.clear()
    return run


def _ask(site: Place, run: Run, ids: dict[str, int], submitted: dict[str, float], *, beside: bool) -> None:
    """Ask polluxd why each job waits that has waited for long; a reason that explains nothing is kept."""
    first = site.idle.measured.first_runs
    for name, job_id in ids.items() if beside else ():
        if job_id in first or time.monotonic() - submitted[name] < _EXPLAINED_AFTER_S:
            continue
        found = site.store.explain(job_id)
        reason = found.allocation.reason if found is not None and found.allocation is not None else ""
        if reason and not _NO_CAUSE.search(run.reasons.get(name, "-")):
            run.reasons[name] = reason


class Acts:
    """An administrator's hands."""

    def __init__(self, site: Place, ids: dict[str, int], *, beside: bool) -> None:
        self._site, self._ids, self._beside = site, ids, beside

    def do(self, act: Act) -> None:
        self._act(act, begin=True)

    def undo(self, act: Act) -> None:
        self._act(act, begin=False)

    def _act(self, act: Act, *, begin: bool) -> None:
        if command := self._command(act, begin=begin):
            with suppress(DevClusterError):  # a job that has ended cannot be held
                self._site.command("scontrol", *command)
        elif act.kind == "restart" and begin:
            self._site.cluster.restart_slurmctld()
        elif act.kind == "reboot" and not begin:
            self._reboot(act.target)
        elif act.kind == "slurmd restart":
            (self._site.cluster.stop_slurmd if begin else self._site.cluster.start_slurmd)(act.target)
        elif act.kind == "limit":
            most = "1" if begin else "-1"
            words = ("modify", "qos", "normal", "set", f"MaxJobsPerUser={most}")
            self._site.command("sacctmgr", "-i", *words)
        elif self._beside and act.kind in POLLUXD:
            POLLUXD[act.kind][not begin](self._site)

    def _reboot(self, node: str) -> None:
        """Do what RebootProgram stands for, once Slurm has called it: when the node's jobs have ended."""
        deadline = time.monotonic() + _REBOOT_S
        while "REBOOT_ISSUED" not in self._site.command("scontrol", "show", "node", node):
            if time.monotonic() > deadline:
                return  # another act has cancelled it
            time.sleep(1.0)
        self._site.cluster.stop_slurmd(node)
        time.sleep(2.0)  # slurmctld compares whole seconds of its request and of the boot
        self._site.cluster.start_slurmd(node, booted=True)
        # Slurm 22.05 forgets nextstate=RESUME where it was reconfigured in the meantime, and drains the node for good.
        time.sleep(5.0)
        with suppress(DevClusterError):
            self._site.command("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def _command(self, act: Act, *, begin: bool) -> tuple[str, ...]:
        job = str(self._ids.get(act.target, 0))
        minutes = f"{act.seconds / 60 + 1:.0f}"
        where = (
            "StartTime=now",
            f"Duration={minutes}",
            f"Nodes={act.target}",
            "Users=root",
            "Flags=ignore_jobs",
        )
        commands: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
            "drain": (
                ("update", f"NodeName={act.target}", "State=DRAIN", "Reason=sites"),
                ("update", f"NodeName={act.target}", "State=RESUME"),
            ),
            "reconfigure": (("reconfigure",), ()),
            "hold": (("hold", job), ("release", job)),
            "suspend": (("suspend", job), ("resume", job)),
            "requeue": (("requeue", job), ()),
            "time limit": (("update", f"JobId={job}", "TimeLimit=30"), ()),
            "comment": (("update", f"JobId={job}", "AdminComment=ticket 12"), ()),
            "reboot": (("reboot", "ASAP", "nextstate=RESUME", "reason=sites", act.target), ()),
            "reservation": (
                ("create", "reservation", "ReservationName=r", *where),
                ("delete", "ReservationName=r"),
            ),
            "partition": (
                ("update", "PartitionName=main", "State=DOWN"),
                ("update", "PartitionName=main", "State=UP"),
            ),
        }
        return commands.get(act.kind, ((), ()))[not begin]


POLLUXD: dict[str, tuple[Callable[[Place], object], Callable[[Place], object]]] = {
    "pause": (
        lambda site: site.polluxd("polluxctl", "pause"),
        lambda site: site.polluxd("polluxctl", "resume"),
    ),
    "polluxd killed": (lambda site: site.daemon.stop(signal.SIGKILL), lambda site: site.daemon.start()),
    "hooks removed": (Place.remove, Place.install),
}
"""What is done to polluxd alone: begin and end."""
