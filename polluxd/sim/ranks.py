"""A simulated job as Slurm and polluxd notice it: its ranks, and its agent's answers to orders.

`polluxd.sim.daemon_engine` calls it. Training itself is `SimulatedJob`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from polluxd.config.settings import GatewaySettings
from polluxd.model import JobState, Move, Placement, Report, Step
from polluxd.sim.cluster import Scenario
from polluxd.sim.policies.daemon_view import seats_of
from polluxd.sim.simulated_job import Seats, SimulatedJob
from polluxd.slurm.fake import FakeSlurm
from polluxd.slurm.protocol import Companion, SlurmJob
from polluxd.store.fake import FakeRows

QUEUE_S = 4.0
"""Seconds of a move through the queue that polluxd and Slurm take, from the order to stop to the start of the new
processes. A scenario's restart cost includes them; the rest passes before the first step."""
START_S = 1.0
"""The same of the start of a job that held nothing."""
TRAINS_ON_S = 120.0
"""A job that was told to stop, and is not requeued, trains on after this (`pollux.checkpoint`)."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all jobs of a run share."""

    slurm: FakeSlurm
    rows: FakeRows
    scenario: Scenario


class Ranks:
    """One job's processes."""

    def __init__(self, job: SimulatedJob, job_id: int, around: Surroundings) -> None:
        self.job, self.job_id = job, job_id
        self._around = around
        self._attempt = -1
        self._first_step_at: float | None = None
        self._stopped: tuple[float, Seats] | None = None
        """When it stopped for a move, and where it trained till then."""
        self._resized = 0
        self._joining: tuple[Move, int] | None = None
        """The growth under way, and its companion."""
        self._lent: dict[int, frozenset[int]] = {}
        """Nodes of each companion."""
        self._publishes_at = 0.0
        moves = around.scenario.moves
        restart = around.scenario.restart_of(job.app.name)
        queue, start = (restart, restart) if moves is None else (moves.requeue, moves.start)
        self._boot = {"requeue": max(queue - QUEUE_S, 0.0), "start": max(start - START_S, 0.0)}
        self._in_place = None if moves is None else moves.resize

    @property
    def first_step_due(self) -> float:
        """When the present attempt makes its first step."""
        return self.job.trains_at

    def live(self, before: float, now: float) -> bool:
        """Live from one moment to the next; tell whether polluxd has news of it."""
        shown, job = self._around.slurm.truth(self.job_id), self.job
        if shown.state is not JobState.RUNNING:
            if job.seats:
                # Its node went down: it goes on from its last checkpoint.
                job.fail(before, 0.5)
            return False
        if shown.raw_state != "RUNNING":
            return False  # its nodes boot
        if shown.restart_count != self._attempt:
            before = self._start(shown)
            self._publish(before)
        if any(self._around.slurm.truth(lender).state is not JobState.RUNNING for lender in self._lent):
            self._lose_companions(shown, before)
        joined = self._join(before, now)
        if self._stopped is not None and now > self._stopped[0] + TRAINS_ON_S:
            before, seats = now, self._stopped[1]
            self._stopped = None
            job.place(seats, now, 0.0)
        job.advance(max(before, joined or before), now - max(before, joined or before))
        if job.ended_at is not None:
            self._end()
            return True
        if self._first_step_at is None and job.seats and job.restarting <= 0:
            self._first_step_at = job.trains_at
            self._note_return()
            self._publish(now)
            return True
        if now >= self._publishes_at or joined is not None:
            self._publish(now)
            return True
        return False

    def obey(self, move: Move, now: float) -> bool:
        """Carry out the order of a move under way, if there is one; tell whether polluxd has news of it."""
        if (
            move.attempt != self._attempt
            or self._around.slurm.truth(self.job_id).state is not JobState.RUNNING
        ):
            return False
        if move.step is Step.RECRUITING and self._joining is None:
            self._recruit(move)
        elif move.step is Step.DRAINING and move.in_allocation:
            self._shrink(move, now)
        elif move.step is Step.DRAINING and self._stopped is None:
            self._stopped = now, self.job.seats
            self.job.place((), now, 0.0)
            return self._around.rows.acknowledge(move.id, now, last_step_at=now)
        return move.step is Step.DRAINING

    def _start(self, shown: SlurmJob) -> float:
        """Begin an attempt where Slurm has started the job; return when."""
        assert shown.start_time is not None
        path = "start" if self._stopped is None else "requeue"
        self._attempt, self._first_step_at, self._stopped = shown.restart_count, None, None
        self._lent, self._joining, self._resized = {}, None, 0
        gpus = next(iter(shown.gpus_per_node_held.values()))
        self.job.place(seats_of(Placement(shown.nodes, gpus)), shown.start_time, self._boot[path], path)
        return shown.start_time

    def _note_return(self) -> None:
        """Report when the move under way ended."""
        rows = self._around.rows
        for number in rows.open:
            move = rows.moves[number - 1]
            if move.job_id == self.job_id and not move.in_allocation:
                rows.resumed[number] = {"first_step_at": self.job.trains_at}

    def _shrink(self, move: Move, now: float) -> None:
        """Train on with the ranks of the nodes that stay."""
        self._regroup(move, now)
        kept = {number for number, _ in self.job.seats}
        self._lent = {lender: nodes for lender, nodes in self._lent.items() if nodes <= kept}
        self._around.rows.acknowledge(move.id, now)
        self._publish(now)

    def _recruit(self, move: Move) -> None:
        """Submit the companion job whose ranks will join."""
        slurm, parent = self._around.slurm, self._around.slurm.truth(self.job_id)
        claim = Companion(self.job_id, self._attempt, move.id, move.nonce)
        companion = slurm.submit(
            parent.spec,
            user=parent.user,
            uid=parent.uid,
            nodes=len(move.added.nodes),
            gpus_per_node=move.added.gpus_per_node,
            companion=claim,
        )
        self._joining = move, companion

    def _join(self, before: float, now: float) -> float | None:
        """Take in the ranks of a companion once they are ready; return when."""
        if self._joining is None:
            return None
        move, companion = self._joining
        shown = self._around.slurm.truth(companion)
        if shown.state.finished or shown.state is JobState.COMPLETING:
            self._joining = None
        if shown.raw_state != "RUNNING" or shown.start_time is None or self._stopped is not None:
            return None
        ready = max(shown.start_time + self._boot["start"], before, self.job.trains_at)
        if ready > now:
            return None
        self.job.advance(before, ready - before)
        self._joining = None
        if self.job.ended_at is not None:
            return ready
        self._lent[companion] = frozenset(number for number, _ in seats_of(move.added))
        self._regroup(move, ready)
        return ready

    def _regroup(self, move: Move, now: float) -> None:
        assert self._in_place is not None
        there = Placement(tuple(sorted(move.target.nodes)), move.target.gpus_per_node)
        self.job.place(seats_of(there), now, self._in_place, "resize")
        self._resized = move.id
        self._around.rows.resumed[move.id] = {"resize_cost": self._in_place}

    def _lose_companions(self, shown: SlurmJob, now: float) -> None:
        """Start the job's own ranks again, without those that a companion had lent."""
        self._lent = {}
        self.job.fail(now, 0.5)
        gpus = next(iter(shown.gpus_per_node_held.values()))
        self.job.place(seats_of(Placement(shown.nodes, gpus)), now, self._boot["start"])
        self._first_step_at = None

    def _end(self) -> None:
        self._around.slurm.finish(self.job_id)
        for lender in (*self._lent, *([self._joining[1]] if self._joining else [])):
            self._around.slurm.finish(lender, JobState.CANCELLED)
        self._around.rows.reports.pop(self.job_id, None)

    def _publish(self, now: float) -> None:
        job, agent = self.job, self.job.agent
        self._publishes_at = now + GatewaySettings().publish_interval_s
        types = bool(self._around.scenario.groups)
        self._around.rows.reports[self.job_id] = Report(
            attempt=self._attempt,
            at=now,
            limits=job.app.limits,
            params=agent.params,
            noise=agent.noise,
            explored_gpus=agent.explored_gpus,
            explored_nodes=agent.explored_nodes,
            prior_gpus=agent.prior_gpus,
            prior_nodes=agent.prior_nodes,
            gpus=job.gpus,
            nodes=job.nodes,
            batch_size=job.total_batch,
            progress=job.progress,
            target=job.target,
            checkpointed=True,
            first_step_at=self._first_step_at,
            gpu_type=agent.fitted_on,
            params_by_type=agent.by_type() if types else {},
            resize="requeue" if self._in_place is None else "in-place",
            resized=self._resized,
        )
