"""What moves cost the trainings of a life, in GPU seconds.

A training stands for a move from its last step until its next one. Where that move came to nothing, these GPU seconds
are lost. They are counted by the cause that the move's record tells, and apart where the job's own user is the cause:
who holds, cancels or requeues a job in mid-move, makes it wait for another one, or whose agent refuses, is
silent, or promises a checkpoint that is not there, has stopped it.

Apart, too, is what a rule costs when it refuses a start for the first time, a rule that no record shows: nobody can
know of it before. Each such rule costs one training some seconds, once, however long a life is; and more where it
refuses what the training had, too, such as a limit lowered under its feet, or a rule that comes while it stands
(`shut_out`). And so is chance: a plain job that took the GPUs of a move, or what a limit had for it, or a node that
was drained, between the requeue and the start, which Slurm gives to plain jobs first. What remains is lost for reasons
that polluxd could know.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from polluxd.model import JobState, Move, Step

from .world import World

_OWN = re.compile(
    r"scontrol hold|Dependency|the job ended|deadline|by a user|cancelled by|time limit is used up"
)

_CHANCE = re.compile(r"went to a job outside|starts no job any more")


@dataclass
class Standing:
    """A training that stands for a move."""

    move: int
    gpus: int
    barred: bool
    """A rule refused its former place when it left it, too."""
    gpu_s: float = 0.0
    shut_out_gpu_s: float = 0.0
    """Of these, while a rule refused its former place, too."""
    own: bool = False


class Costs:
    """Of one life."""

    def __init__(
        self,
        world: World,
        unknown: Callable[[Move], bool],
        barred: Callable[[Move], bool],
        by_chance: Collection[tuple[int, int]],
    ) -> None:
        self._world, self._by_chance = world, by_chance
        self._barred = barred
        """Whether a rule refuses to start its job where the move took it from."""
        self._unknown = unknown
        """Whether a rule refused the move's start that nothing had shown before."""
        self.gpu_s = 0.0
        self.lost: Counter[str] = Counter()
        self.own: Counter[str] = Counter()
        self.learnt: Counter[str] = Counter()
        self.shut_out: Counter[str] = Counter()
        self.chance: Counter[str] = Counter()
        self.standing: dict[int, Standing] = {}

    def measure(self, seconds: float) -> None:
        """Take in what happened in these seconds."""
        world = self._world
        for job_id in world.trainings:
            if world.slurm.raw(job_id).state is JobState.RUNNING:
                self.gpu_s += sum(world.slurm.raw(job_id).held.values()) * seconds
        for number in world.rows.open:
            move = world.rows.moves[number - 1]
            if move.path == "requeue" and Step.CHECKPOINTED in move.times:
                self.standing.setdefault(move.job_id, Standing(number, move.source.gpus, self._barred(move)))
        for job_id, one in list(self.standing.items()):
            move = world.rows.moves[one.move - 1]
            if self._stands(job_id, move):
                one.gpu_s += one.gpus * seconds
                one.shut_out_gpu_s += one.gpus * seconds if self._barred(move) else 0.0
                one.own |= world.slurm.raw(job_id).on_hold or not world.trainings[job_id].honest
            elif move.step.terminal:
                self._ends(move, self.standing.pop(job_id))

    def _stands(self, job_id: int, move: Move) -> bool:
        job, training = self._world.slurm.raw(job_id), self._world.trainings[job_id]
        if job.state.finished:
            return False
        if job.state is not JobState.RUNNING:
            return True
        return training.attempt == job.restarts == move.attempt and training.stopped_at is not None

    def _ends(self, move: Move, one: Standing) -> None:
        if move.step is not Step.FAILED:
            return
        cause = re.sub(r" on [\dn:,]+|\(attempt.*?\)|\d+", "", move.detail)
        own = one.own or _OWN.search(move.detail) is not None
        chance = _CHANCE.search(move.detail) is not None or (move.job_id, move.attempt + 1) in self._by_chance
        kind = self.own if own else self.chance if chance else self.lost
        learnt = self._unknown(move)
        if learnt or (kind is self.lost and not one.barred):
            kind = self.learnt if learnt else kind
            self.shut_out[cause] += one.shut_out_gpu_s
            one.gpu_s -= one.shut_out_gpu_s
        kind[cause] += one.gpu_s
