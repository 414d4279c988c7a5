"""Jobs on a Slurm in memory, and polluxd's reconciler over it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from polluxd.apply.paths import Intent
from polluxd.apply.reconciler import Reconciler
from polluxd.config.settings import MoveSettings, PolicySettings
from polluxd.model import JobSpec, Move, Node, Placement, Report, Step
from polluxd.slurm.protocol import Companion, Geometry
from polluxd.store import CycleRecords
from polluxd.store.fake import FakeRows
from tests import build
from tests.troubled_slurm import TroubledSlurm
from tests.troubled_store import TroubledStore


def on(name: str, gpus: int) -> Placement:
    return Placement((name,), gpus)


class Site:
    default_time_s = 86400.0
    """Of companions: their partition's DefaultTime."""

    def __init__(
        self,
        nodes: Iterable[Node] = (Node("n1", 8, cpus=8),),
        *,
        slurm: TroubledSlurm | None = None,
        **limits: Any,
    ) -> None:
        self.slurm = slurm or TroubledSlurm(list(nodes))
        self.rows = FakeRows(self.slurm.clock)
        self.store = TroubledStore(self.rows)
        assert self.store.lead() == 1
        self.reports: dict[int, Report] = {}
        self.acting = Reconciler(
            self.slurm,
            self.store,
            limits=MoveSettings(**{"cooldown_s": 0.0, **limits}),
            lease=300.0,
            authorize=lambda: 1,
            clock=self.slurm.clock,
            monotonic=self.slurm.clock,
        )

    def running(self, at: Placement, spec: JobSpec | None = None, **more: Any) -> int:
        """A new job that runs at `at`."""
        job_id = self.slurm.submit(spec or JobSpec(), **more)
        self.slurm.configure(job_id, Geometry(at.nodes, at.gpus_per_node, 1), start=True)
        self.slurm.advance(2.0)
        self.store.sync_jobs(self.slurm.observe().jobs)
        return job_id

    def begin(
        self, *wished: tuple[int, str, Placement, Placement], attempt: int = 0, user: str = ""
    ) -> list[int]:
        """Begin moves by job, path, source and target; return the jobs whose move has begun."""
        intents = [
            Intent(job, attempt, path, source, target, "", user) for job, path, source, target in wished
        ]
        return [
            move.job_id
            for move in self.acting.begin(intents, self.store.records(restarts_since=self.hour_ago))
        ]

    @property
    def hour_ago(self) -> float:
        return self.slurm.clock() - 3600.0

    def spent(self, user: str) -> str:
        """Why no job of `user` may be restarted now."""
        records = self.store.records(restarts_since=self.hour_ago)
        return self.acting.rules(self.acting.gather(self.slurm.observe()), records).spent(user)

    def at_step(self, job_id: int, step: Step, path: str = "requeue", target: int = 2, **more: Any) -> Move:
        """Put a move to more GPUs of n1 at a step, which it has reached half a second ago."""
        now, source = self.slurm.clock(), Placement() if path == "start" else on("n1", 1)
        times = {Step.PLANNED: now - 1.0, step: now - 0.5}
        words = {"id": len(self.rows.moves) + 1, "job_id": job_id, "times": times, **more}
        move = build.move(path, source, on("n1", target), step, **words)
        self.rows.moves.append(move)
        self.rows.open[move.id] = None
        return move

    def reach(self, number: int, *steps: Step) -> None:
        for step in steps:
            self.store.advance(number, step, self.slurm.clock(), epoch=1)

    def turn(self, seconds: float = 0.0, *, paused: bool = False) -> int:
        seen = self.acting.gather(self.slurm.observe())
        settings = PolicySettings(paused=paused)
        left = self.acting.tick(seen, replace(self.store.records(), reports=self.reports, settings=settings))
        self.slurm.advance(seconds)
        return left

    @property
    def steps(self) -> list[Step]:
        return [move.step for move in self.rows.moves]

    def lend(self, job_id: int, number: int, **more: Any) -> int:
        """Submit a companion of a job for move `number`."""
        nonces = {move.id: move.nonce for move in self.rows.moves}
        claim = Companion(job_id, 0, number, nonces.get(number, "f" * 32))
        return self.slurm.submit(JobSpec(), companion=claim, time_limit_s=self.default_time_s, **more)

    def fresh(self, *intents: Intent) -> bool:
        """Whether polluxd begins these moves, by a plan that knows of no open move."""
        return bool(self.acting.begin(intents, CycleRecords()))
