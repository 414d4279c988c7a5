"""Measure a run of the demo from outside, with squeue and scontrol only.

The same code measures the Pollux run and the plain-Slurm run. So neither run is judged by its own account.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

_GPUS = re.compile(r"gpu(?::[^,:=(]+)?[:=](\d+)")
_COMPANION = ".companion"
"""The suffix of a companion's name. The name before it is that of the job to which it lends its nodes."""


class SlurmSilentError(Exception):
    """A Slurm command failed or did not answer in time."""


def slurm(
    command: Sequence[str], env: Mapping[str, str], *, timeout_s: float = 15, text: str | None = None
) -> str:
    """Run one Slurm command and return its output.

    Raises:
        SlurmSilentError: the command failed; the message carries its complaint.
    """
    try:
        done = subprocess.run(
            command, env=dict(env), input=text, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise SlurmSilentError(f"{command[0]} did not answer within {timeout_s:g} s") from None
    if done.returncode:
        raise SlurmSilentError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Seen:
    """One job as squeue shows it at one moment."""

    state: str
    gpus: int
    """GPUs held now: 0 unless it runs."""
    nodes: str


def observe(env: Mapping[str, str]) -> dict[int, Seen]:
    """Return all jobs that squeue lists, by job id.

    A companion counts as part of the job to which it lends its node.
    """
    # %b: GPUs per node as requested, which is what a running job holds on each of its %D nodes.
    out = slurm(["squeue", "-h", "-a", "-t", "all", "-o", "%i|%T|%D|%b|%N|%j"], env)
    seen: dict[int, Seen] = {}
    named: dict[str, int] = {}
    companions: list[tuple[str, Seen]] = []
    for line in sorted(out.splitlines(), key=lambda line: int(line.split("|", 1)[0])):
        ident, state, nodes, gres, names, job = line.split("|", 5)
        found = _GPUS.search(gres)
        held = int(nodes) * int(found[1]) if found and state == "RUNNING" else 0
        one = Seen(state, held, names)
        if job.endswith(_COMPANION):
            companions.append((job.removesuffix(_COMPANION), one))
        else:
            named[job] = int(ident)  # of two jobs with the same name, the other one has ended
            seen[int(ident)] = one
    for job, companion in companions:
        parent = named.get(job)
        if parent is not None and companion.gpus and seen[parent].gpus:
            whole = seen[parent]
            nodes = f"{whole.nodes},{companion.nodes}"
            seen[parent] = replace(whole, gpus=whole.gpus + companion.gpus, nodes=nodes)
    return seen


def record_of(job_id: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the key=value pairs of `scontrol show job`.

    Of a value with blanks, only the first word is kept.
    """
    out = slurm(["scontrol", "show", "job", "-o", str(job_id)], env)
    return dict(word.split("=", 1) for word in out.split() if "=" in word)


@dataclass(slots=True)
class Track:
    """One job of one run: its submission, and what it has held since then."""

    name: str
    job_id: int
    submitted_at: float
    """When sbatch returned, by this process's clock: a requeue resets Slurm's SubmitTime [POSIX s]."""
    ended_at: float | None = None
    state: str = "PENDING"
    nodes: str = ""
    gpus: list[tuple[float, int]] = field(default_factory=list)
    """(time [POSIX s], GPUs held), one entry per change."""

    def note(self, at: float, seen: Seen) -> None:
        self.state = seen.state
        self.nodes = seen.nodes if seen.gpus else ""
        if not self.gpus or self.gpus[-1][1] != seen.gpus:
            self.gpus.append((at, seen.gpus))
        if self.ended and self.ended_at is None:
            self.ended_at = at

    @property
    def ended(self) -> bool:
        return self.state not in (
            *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "RESIZING"),
            *("REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "STAGE_OUT", "STOPPED", "SIGNALING"),
        )

    def held_gpu_s(self, begun: float, ended: float) -> float:
        """GPU-seconds that the job held between two times [POSIX s]."""
        until = ended if self.ended_at is None else min(self.ended_at, ended)
        times = [min(max(at, begun), until) for at, _ in self.gpus] + [until]
        return sum(
            held * (then - at) for (_, held), at, then in zip(self.gpus, times, times[1:], strict=False)
        )

    @property
    def wait_s(self) -> float | None:
        """From submission to the first GPUs [s]."""
        first = next((at for at, held in self.gpus if held), None)
        return None if first is None else max(first - self.submitted_at, 0.0)

    @property
    def jct_s(self) -> float | None:
        """Job completion time: from submission to the end [s]."""
        return None if self.ended_at is None else self.ended_at - self.submitted_at


@dataclass(slots=True)
class Recording:
    """All jobs of one run."""

    started_at: float = field(default_factory=time.time)
    tracks: dict[int, Track] = field(default_factory=dict)

    def note(self, at: float, seen: Mapping[int, Seen]) -> None:
        for job_id, track in self.tracks.items():
            if job_id in seen:
                track.note(at, seen[job_id])

    def settle(self, env: Mapping[str, str], job_id: int) -> None:
        """Replace the sampled end and final state of a job by Slurm's own record.

        The samples are a second apart.
        """
        record, track = record_of(job_id, env), self.tracks[job_id]
        track.state = record.get("JobState", track.state)
        if track.ended and record.get("EndTime", "Unknown") != "Unknown":
            # Slurm's times are whole seconds. The sample saw the end at most a second late.
            track.ended_at = time.mktime(time.strptime(record["EndTime"], "%Y-%m-%dT%H:%M:%S"))

    @property
    def all_ended(self) -> bool:
        return all(t.ended for t in self.tracks.values())

    @property
    def ended_at(self) -> float:
        """When the last job ended [POSIX s]."""
        return max((t.ended_at or 0.0 for t in self.tracks.values()), default=self.started_at)

    @property
    def mean_jct_s(self) -> float | None:
        times = [t.jct_s for t in self.tracks.values()]
        known = [t for t in times if t is not None]
        return sum(known) / len(known) if known and len(known) == len(times) else None

    def idle_gpu_s(self, capacity: int) -> float | None:
        """GPU-seconds that no job held, from the first submission to the last end.

        None until all jobs have ended.
        """
        tracks = self.tracks.values()
        ends = [t.ended_at for t in tracks if t.ended_at is not None]
        if not ends or len(ends) < len(tracks):
            return None
        begun, ended = min(t.submitted_at for t in tracks), max(ends)
        return capacity * (ended - begun) - sum(t.held_gpu_s(begun, ended) for t in tracks)
