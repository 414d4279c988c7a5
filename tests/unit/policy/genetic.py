"""Solve by the paper's genetic algorithm, for comparison.

Source: Pollux, section 4.2.1, written from the paper's description. It evolves allocation matrices: population and
generations of 100, per-job mutation, crossover over jobs, tournament selection, repair to capacity. Its repair is
held to the same placements as our solver's (one node, or whole nodes; options of the table), so that the two compete
for the same optimum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polluxd.model import Snapshot
from polluxd.policy import objective, owners
from polluxd.policy.domains import split
from polluxd.policy.option_table import OptionTable, build
from polluxd.policy.packing import Packing

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Evolved(NamedTuple):
    objective: float
    allocations: Ints
    """[J, N]: GPUs per job of the table and node."""


def decide(snapshot: Snapshot, *, population: int = 100, generations: int = 100, seed: int = 0) -> Evolved:
    """Return the fittest allocation found.

    Takes snapshots of one domain with one node size, whole nodes and no ceilings. Raises ValueError for other
    snapshots: the algorithm is there to compare with, not to serve.
    """
    domains = split(snapshot)
    if len(domains) != 1 or len({n.gpus for n in domains[0].nodes}) != 1 or snapshot.settings.partial_nodes:
        raise ValueError("the reference solver takes one domain of equal nodes, whole nodes beyond one")
    table = build(domains[0], snapshot.settings, owners.mean_weight(snapshot))
    if table.groups:
        raise ValueError("the reference solver takes no ceilings or guarantees")
    packing = Packing(domains[0].nodes, table.jobs, partial=False)
    world = _World(table, packing, snapshot.settings.power)
    rng = np.random.default_rng(seed)
    pool = np.repeat(world.home[None], population, axis=0)
    pool[1:] = world.repair(world.mutate(pool[1:], rng), rng)
    scores = world.scores(pool)
    for _ in range(generations):
        parents = pool[_tournament(scores, rng)]
        children = world.repair(world.mutate(_crossover(parents, rng), rng), rng)
        both = np.concatenate([pool, children])
        scores = np.concatenate([scores, world.scores(children)])
        best = np.argsort(-scores, kind="stable")[:population]
        pool, scores = both[best], scores[best]
    options, moved = world.read(pool[:1])
    x = table.x(options[0], moved[0])
    return Evolved(objective.fitness(x, table.weight, snapshot.settings.power), pool[0])


def _tournament(scores: Floats, rng: np.random.Generator) -> Ints:
    rivals = rng.integers(scores.size, size=(scores.size, 2))
    return np.where(scores[rivals[:, 0]] >= scores[rivals[:, 1]], rivals[:, 0], rivals[:, 1])


def _crossover(parents: Ints, rng: np.random.Generator) -> Ints:
    """Cross at one point over jobs: one parent's first jobs, another's last."""
    other = parents[rng.permutation(parents.shape[0])]
    cut = rng.integers(parents.shape[1] + 1, size=(parents.shape[0], 1, 1))
    return np.where(np.arange(parents.shape[1])[None, :, None] < cut, parents, other)


class _World:
    """The table as arrays over jobs and shapes.

    With nodes of g GPUs, one node with k GPUs is shape k, and N whole nodes are shape g + N.
    """

    def __init__(self, table: OptionTable, packing: Packing, power: float) -> None:
        jobs, nodes = len(table.jobs), len(packing.nodes)
        self.size = size = packing.nodes[0].gpus
        self.allowed = np.array([packing.allowed(j) for j in range(jobs)]).reshape(jobs, nodes)
        self.option = np.full((jobs, size + nodes + 1), -1, dtype=np.int64)
        for j in range(jobs):
            for o in table.options(j):
                n, k = table.shape(o)[:2]
                self.option[j, k if n <= 1 else size + n] = o
        # The largest permitted shape that a shape can be cut down to, on one node and beyond.
        have = self.option >= 0
        steps = np.arange(size + nodes + 1)
        single = np.maximum.accumulate(np.where(have[:, : size + 1], steps[: size + 1], 0), axis=1)
        several = np.maximum.accumulate(np.where(have[:, size + 1 :], steps[size + 1 :], 0), axis=1)
        self.cut = np.concatenate([single, several], axis=1)
        self.table, self.power = table, power
        self.present = np.zeros((jobs, nodes), dtype=np.int64)
        for j, (numbers, per_node) in enumerate(packing.home):
            self.present[j, list(numbers)] = per_node
        self.pinned = table.pinned
        held = self.present[self.pinned].sum(axis=0)
        self.capacity = np.maximum(packing.free - held, 0)
        self.whole = (packing.free == size) & (held == 0)
        self.home = self.repair(self.present[None], np.random.default_rng(0))[0]

    def mutate(self, pool: Ints, rng: np.random.Generator) -> Ints:
        """Mutate some jobs of each member, from one to about all.

        A mutated job gets a random number of GPUs on one node. Half of them lose their other GPUs first.
        """
        members, jobs, nodes = pool.shape
        pool = pool.copy()
        rate = rng.choice([1.0, 1.0, 3.0, 0.1 * jobs], size=(members, 1)) / max(jobs, 1)
        hit = rng.random((members, jobs)) < rate
        which = np.argwhere(hit)
        if which.size:
            m, j = which.T
            n = rng.integers(nodes, size=m.size)
            afresh = rng.random(m.size) < 0.5
            pool[m[afresh], j[afresh]] = 0
            pool[m, j, n] = rng.integers(self.size + 1, size=m.size)
            # Some grow over whole nodes at once: single steps would never pass through a permitted shape.
            wide = rng.random(m.size) < 0.3
            extra = rng.random((m.size, nodes)) < rng.random((m.size, 1))
            pool[m[wide], j[wide]] = np.where(extra[wide], self.size, pool[m[wide], j[wide]])
        return pool

    def repair(self, pool: Ints, rng: np.random.Generator) -> Ints:
        """Cut each member to what can be placed.

        It is cut to partitions, to permitted shapes, to capacity in a random order of jobs, and to shapes again.
        """
        pool = self._shape(pool * (self.allowed & ~self.pinned[:, None])[None])
        members, jobs, _ = pool.shape
        order = np.argsort(rng.random((members, jobs)), axis=1)
        row = np.arange(members)[:, None]
        ranked = pool[row, order]
        before = np.cumsum(ranked, axis=1) - ranked
        ranked = np.clip(np.minimum(ranked, self.capacity[None, None] - before), 0, None)
        cut = np.empty_like(pool)
        cut[row, order] = ranked
        repaired = self._shape(cut)
        repaired[:, self.pinned] = self.present[self.pinned]
        return repaired

    def _shape(self, pool: Ints) -> Ints:
        """Cut each job to a permitted shape.

        A job with two or more whole nodes keeps whole nodes; any other keeps its fullest node.
        """
        full = (pool == self.size) & self.whole[None, None]
        count = full.sum(axis=2)
        one = np.zeros_like(pool)
        best = pool.argmax(axis=2)
        np.put_along_axis(one, best[..., None], pool.max(axis=2)[..., None], axis=2)
        job = np.arange(pool.shape[1])[None, :]
        wide = np.where(count >= 2, self.cut[job, np.minimum(self.size + count, self.cut.shape[1] - 1)], 0)
        keep = wide - self.size
        ordinal = np.cumsum(full, axis=2)
        several = np.where(full & (ordinal <= keep[..., None]), self.size, 0)
        single = np.minimum(one, self.cut[job, one.max(axis=2)][..., None])
        return np.where((wide > self.size)[..., None], several, single)

    def read(self, pool: Ints) -> tuple[Ints, Bools]:
        """[P, J]: option of every job, and whether it moves."""
        spread = (pool > 0).sum(axis=2)
        shape = np.where(spread > 1, self.size + spread, pool.max(axis=2))
        options = self.option[np.arange(pool.shape[1])[None, :], shape]
        options[:, self.pinned] = self.table.start[:-1][self.pinned]
        return options, np.any(pool != self.present[None], axis=2)

    def scores(self, pool: Ints) -> Floats:
        """[P]: total utility, which orders members as the fitness does."""
        options, moved = self.read(pool)
        return np.asarray(np.where(moved, self.table.move[options], self.table.stay[options]).sum(axis=1))
