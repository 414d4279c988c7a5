"""A training that records every sample, and moves that a test orders."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from contrib.chaos.ledger import Ledger, Lineage, ledgers, lineage
from contrib.devcluster import DevCluster
from contrib.devcluster.processes import pids_with_environment
from polluxd.model import JobState, Move, Placement, Step
from polluxd.slurm.protocol import SlurmJob

from .conftest import Loop


class Elastic:
    """One job of contrib/chaos/counted.py, and the nodes it was moved to."""

    def __init__(
        self,
        loop: Loop,
        name: str,
        directive: str,
        *,
        first_in_path: Path | None = None,
        container: Path | None = None,
        options: str = "",
    ) -> None:
        self.loop, self.name = loop, name
        self.folder = loop.folder / f"ledger-{name}"
        self.folder.mkdir()
        self.folder.chmod(0o1777)
        self._end = loop.folder / f"{name}.end"
        path = f"PATH={first_in_path}:$PATH " if first_in_path else ""
        words = ["pollux run", f"--container {container}"] if container else ["pollux run"]
        words += ["contrib/chaos/counted.py --passes 100000"]
        words += [f"--until {self._end} --ledger {self.folder} {options}"]
        self.job_id = loop.sbatch(name, path + " ".join(words), directive=directive)
        self.nodes: tuple[str, ...] = ()
        """The nodes of the job's ranks, the batch host first."""

    def begin(self, *, pinned: bool = True) -> None:
        """Wait for the job's first steps. With `pinned`, the job then moves only when the test orders it."""
        self.trains("its first report")
        if pinned:
            self.pin()
            # polluxd may have begun a move of its own before the pin.
            moves = self.loop.store.moves
            self.loop.until(
                lambda: all(m.step.terminal for m in moves(self.job_id)),
                why="the end of moves before the pin",
            )
            self.trains("its report after moves before the pin")
        shown = self.slurm
        self.nodes = (shown.batch_host, *sorted(set(shown.nodes) - {shown.batch_host}))

    def pin(self, word: str = "pin") -> None:
        """Pin the job, or run another command of polluxctl on it, such as `unpin`."""
        done = self.loop.daemon.command("polluxctl", word, str(self.job_id))
        assert done.returncode == 0, done.stderr

    def trains(self, why: str) -> None:
        """Wait for a step of the present attempt."""

        def reported() -> bool:
            shown, report = self.slurm, self.loop.store.reports().get(self.job_id)
            assert not shown.state.finished, f"it ended: {shown.raw_state}"
            return (
                report is not None
                and report.attempt == shown.restart_count
                and report.first_step_at is not None
            )

        self.loop.until(reported, why=why)

    @property
    def slurm(self) -> SlurmJob:
        """The job by itself, as Slurm shows it."""
        return self.loop.job(self.job_id)

    def order(self, path: str, nodes: Sequence[str]) -> int:
        """Have polluxd move the job; return the move's id once it is written."""
        source, target = Placement(self.nodes, 1), Placement(tuple(nodes), 1)
        return self.loop.plan(self.job_id, path, source, target).id

    def moved(self, number: int) -> Move:
        """Wait until a move ends, whether it succeeds or fails."""
        self.loop.until(lambda: self.move(number).step.terminal, why=f"the end of move {number}")
        return self.move(number)

    def move(self, number: int) -> Move:
        return next(m for m in self.loop.store.moves(self.job_id) if m.id == number)

    def go(self, path: str, *nodes: str) -> Move:
        """Order a move and see it through."""
        ended = self.moved(self.order(path, nodes))
        assert ended.step is Step.TRAINING, (
            f"move {ended.id} ({path}) to {nodes}: {ended.step}, {ended.detail}"
        )
        self.nodes = nodes
        return ended

    # -- companions -----------------------------------------------------------------------------------------------

    def companions(self) -> list[SlurmJob]:
        """Return the job's companions that wait or run.

        A companion that was told to end may take a moment.
        """
        jobs = self.loop.slurm.observe().jobs
        named = [j for j in jobs if j.companion is not None and j.companion.parent == self.job_id]
        return [job for job in named if job.state in (JobState.PENDING, JobState.RUNNING)]

    def alone(self, why: str) -> None:
        """Wait until the job has no companion."""
        self.loop.until(lambda: not self.companions(), why=f"its companions' end: {why}")

    # -- what its ranks wrote down ------------------------------------------------------------------------------

    def ledgers(self) -> list[Ledger]:
        return ledgers(self.folder)

    def sizes(self) -> dict[int, list[int]]:
        """Return the numbers of ranks that each process trained among, by its id.

        Each list is in the order of the training.
        """
        return {ledger.pid: ledger.sizes() for ledger in self.ledgers()}

    def steps_among(self, ranks: int) -> None:
        """Wait until the newest step of all was made among so many ranks.

        Each of them has written a step among so many: one rank may write it later than another.
        """

        def written() -> bool:
            done = [each.done[-1] for each in self.ledgers() if each.done]
            newest = max(done, key=lambda one: one.at).ranks if done else 0
            return newest == ranks <= sum(one.ranks == ranks for one in done)

        self.loop.until(written, why=f"a step among {ranks} ranks")

    def end(self) -> Lineage:
        """Let the current pass be the last, and wait for the job's end.

        The job must complete, and every sample must count once in each pass.
        """
        self._end.touch()
        self.loop.until(lambda: self.slurm.state.finished, why="the training's end")
        log = (self.loop.folder / f"{self.name}.log").read_text(errors="replace")
        assert self.slurm.state is JobState.COMPLETED, log[-3000:]
        told = lineage(self.ledgers())
        faults = told.faults(told.counts[0])
        assert not faults, f"{faults}; {told.launches} launches, sizes {self.sizes()}; {log[-2000:]}"
        assert told.counts[0] > 0
        return told


def kill_processes(cluster: DevCluster, job_id: int) -> int:
    """Kill (-9) a job's script and steps; return the number of processes."""
    theirs = pids_with_environment(f"SLURM_CONF={cluster.slurm_conf}", f"SLURM_JOB_ID={job_id}")
    for pid in theirs:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(theirs)
