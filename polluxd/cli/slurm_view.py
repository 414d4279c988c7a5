"""What Slurm itself shows the asking user beside polluxd: plain jobs, nodes with their states, and how a job ended."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polluxd.errors import SlurmError
from polluxd.model import JobState, Node
from polluxd.slurm.configuration import Slurm
from polluxd.slurm.directives import MARK
from polluxd.slurm.node_records import attribute, parse_nodes
from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.queue import Known, jobs_query, parse_jobs

from . import access
from .output import Column, Row, duration, plain
from .web.overview import RestingReader

PLAIN_COLUMNS = (
    Column("job_id", "PLAIN JOB", right=True),
    Column("name", "NAME", flexible=True, least=8),
    Column("user", "USER", rank=3),
    Column("state", "STATE"),
    Column("gpus", "GPUS", plain, right=True),
    Column("nodes", "NODES", rank=2, flexible=True, least=8),
    Column("age_s", "SINCE", duration, right=True, rank=4),
    Column("reason", "REASON", rank=1),
)
"""`age_s`: since its start, or since it came into the queue."""
_STATE = re.compile(r"NodeName=(\S+) .*? State=(\S+)")
_PATIENCE_S = 4.0


@dataclass(frozen=True)
class Beside:
    """What Slurm shows at one moment."""

    plain_jobs: list[dict[str, Any]]
    """Rows for `PLAIN_COLUMNS`, those that hold GPUs first."""
    states: Mapping[str, str]
    """Of nodes, in Slurm's words: `mixed`, `idle+drain`."""
    gpus: int
    """Of nodes on which work may start or runs."""
    used: int
    """Of these, those in use, also by jobs that the viewer may not see."""
    pollux: int = 0
    """Of these, those of Pollux jobs and companions that the viewer may see."""


class SlurmView:
    """Asks Slurm as the user who runs this, so that Slurm hides what it hides from them; and not too often."""

    def __init__(self, slurm: Slurm) -> None:
        slurm.timeout = _PATIENCE_S
        self._slurm = slurm
        self._reader = RestingReader()
        self._known = Known(jobs_query().separator)

    def read(self) -> Beside | None:
        """Return what Slurm shows; None where it does not answer."""
        found: Beside | None = self._reader.read("beside", self._read)
        return found

    def _read(self) -> Beside | None:
        query = jobs_query()
        try:
            shown = self._slurm.ask(
                *("squeue", "--local", "--noheader", "--array"), environment={"SQUEUE_FORMAT2": query.format}
            )
            records = self._slurm.ask("scontrol", "--local", "-o", "-d", "show", "node")
            queue, known = parse_jobs(shown, query, self._known), parse_nodes(records)
        except SlurmError:
            return None
        self._known = self._known._replace(records=queue.records)
        jobs, nodes, _ = attribute(queue, known)
        rows = [_row(job, time.time()) for job in jobs if _is_plain(job)]
        ours = (job for job in jobs if job.admin_comment.startswith(MARK) and job.state is JobState.RUNNING)
        return Beside(
            sorted(rows, key=lambda row: (row["state"] == "PENDING", -(row["gpus"] or 0), row["job_id"])),
            {name: state.lower() for name, state in _STATE.findall(records)},
            sum(node.gpus for node in nodes if _serves(node, known.gpus_used)),
            sum(known.gpus_used.values()),
            sum(sum(job.gpus_per_node_held.values()) for job in ours),
        )

    def ending(self, job_id: int) -> list[str]:
        """Say how a job ended, where its output is and how to go on; nothing where Slurm has forgotten it."""
        found: list[str] = self._reader.read(("ending", job_id), lambda: self._ending(job_id))
        return found

    def _ending(self, job_id: int) -> list[str]:
        try:
            record = self._slurm.ask("scontrol", "-o", "show", "job", str(job_id))
            named = ("JobState", "ExitCode", "BatchHost", "WorkDir", "StdOut")
            state, ending, host, folder, output = (_field(record, key) for key in named)
        except SlurmError:  # it ended more than MinJobAge ago
            words = ("-nXP", f"--jobs={job_id}", "--format=State,ExitCode,NodeList,AdminComment,WorkDir")
            try:
                record = "".join(self._slurm.ask("sacct", *words).splitlines()[-1:])
            except SlurmError:  # no slurmdbd
                return []
            if record.count("|") < 4:
                return []
            state, ending, host, _, folder = record.split("|", 4)
            output = f"{folder}/slurm-{job_id}.out, unless --output named another file"
        code, _, signal = ending.partition(":")
        by = f"by signal {signal}" if signal not in ("", "0") else f"with exit status {code}"
        submitted = re.search(r"\bsubmitted=(\d+)", record)
        kept = f"{folder}/pollux-checkpoints/{job_id}-{submitted[1] if submitted else 'TIME'}"
        return [
            f"Slurm's record: {state}, {by}{f' on {host}' if host else ''}.",
            f"Its output: {output}.",
            f"Its checkpoints: {kept}, unless the script or POLLUX_CHECKPOINT_DIR named a folder. A new job whose "
            "script says checkpoint_dir= with that folder goes on from the newest.",
        ]


def _field(record: str, key: str) -> str:
    """Return one field of a record; the hook keeps such words out of what users write."""
    found = re.search(rf"\s{key}=(\S+)", record)
    return found[1] if found else ""


def _is_plain(job: SlurmJob) -> bool:
    # A job of Pollux whose mark cannot be read is none of these either.
    return not job.admin_comment.startswith(MARK) and not job.state.finished


def _serves(node: Node, used: Mapping[str, int]) -> bool:
    return node.schedulable or used.get(node.name, 0) > 0


def _row(job: SlurmJob, now: float) -> dict[str, Any]:
    waits = job.state is JobState.PENDING
    since = job.queued_at if waits else job.start_time
    gpus = 0 if waits else sum(job.gpus_per_node_held.values())
    return {
        **{key: getattr(job, key) for key in ("job_id", "name", "user", "account")},
        "state": job.raw_state or job.state.value,
        "gpus": gpus or job.tres.get("gres/gpu"),
        "nodes": ",".join(job.nodes),
        "age_s": None if since is None else max(now - since, 0.0),
        "reason": job.reason if waits else "",
        **{"moves": None, "moving": None},  # it has no page of its own
    }


def gpus_held(beside: Beside | None, rows: Sequence[Row]) -> str:
    """Return how the cluster's GPUs are used: `16 GPUs: 9 held by Pollux jobs, 4 by others, 3 idle`."""
    held = sum(row["gpus"] or 0 for row in rows)
    if beside is None:
        return f"{held} GPUs held"
    held = max(held, min(beside.pollux, beside.used))  # a companion may have begun, and its job not yet grown
    used = max(beside.used, held)
    idle = max(beside.gpus - used, 0)
    return f"{beside.gpus} GPUs: {held} held by Pollux jobs, {used - held} by others, {idle} idle"


def slurm_view(config: Path | None) -> SlurmView:
    """Return the view of who runs this, of the cluster of polluxd.toml where that may be read."""
    conf = access.configuration(config).slurm.conf if access.may_read_database(config) else None
    return SlurmView(Slurm(conf))
