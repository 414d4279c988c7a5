"""Random instances of the count programs, with their best totals.

The totals come from trying everything, or from HiGHS run to the end.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from polluxd.policy import integer
from polluxd.policy.owners import Group


def flat(table):
    """Flatten a table of options into arrays of GPUs, values and starts.

    The table lists the options of each job as (GPUs, value).
    """
    start = np.cumsum([0, *(len(options) for options in table)])
    gpus = np.array([k for options in table for k, _ in options], dtype=np.int64)
    value = np.array([v for options in table for _, v in options])
    return gpus, value, start


def plain(seed):
    """Return options of up to five jobs, and a capacity in GPUs.

    The first option of each job is no GPUs.
    """
    rng = random.Random(seed)
    table = []
    for _ in range(rng.randint(1, 5)):
        none = (0, rng.choice([-1000.0, -1.0, 0.0]))
        sizes = rng.sample(range(1, 9), rng.randint(0, 4))
        table.append([none, *((k, rng.choice([rng.uniform(-5, 5), 1.0])) for k in sizes)])
    return table, rng.randint(0, 16)


def best_plain(table, capacity):
    return max(
        sum(v for _, v in pick) for pick in itertools.product(*table) if sum(k for k, _ in pick) <= capacity
    )


def limited(seed, *, floors):
    """Return options of a few jobs, a capacity in GPUs, and limited groups.

    The groups are two accounts and the users within them. Every group has a limit.
    """
    rng = random.Random(seed)
    table = [
        [(0, -50.0), *((k, rng.uniform(-5, 5)) for k in sorted(rng.sample(range(1, 7), rng.randint(1, 3))))]
        for _ in range(rng.randint(1, 5))
    ]
    user = [rng.randint(0, 3) for _ in table]
    capacity = rng.randint(0, 12)
    groups, left = [], capacity
    for name, keys in (("user", user), ("account", [u // 2 for u in user])):
        for key in sorted(set(keys)):
            members = tuple(j for j, k in enumerate(keys) if k == key)
            ceiling = rng.randint(0, 12)
            floor = rng.randint(0, min(ceiling, left)) if floors and name == "account" else 0
            left -= floor
            groups.append(Group(f"{name} {key}", members, floor, ceiling))
    return table, capacity, groups


def best_limited(table, capacity, groups):
    """Return the best total under limits and guarantees.

    A guarantee sets GPUs aside for its group, as far as the group can use them.
    """
    best = -np.inf
    asked = {g.name: _useful(table, g, groups, min(capacity, g.floor)) for g in groups if g.floor}
    for pick in itertools.product(*table):
        used = {g.name: sum(pick[j][0] for j in g.members) for g in groups}
        if any(used[g.name] > g.ceiling for g in groups):
            continue
        aside = sum(max(floor - used[name], 0) for name, floor in asked.items())
        if sum(k for k, _ in pick) + aside <= capacity:
            best = max(best, sum(v for _, v in pick))
    return best


def _useful(table, group, groups, capacity):
    """The fewest GPUs with which the group alone does as well as it ever can."""
    best, least = -np.inf, 0
    inner = [g for g in groups if set(g.members) <= set(group.members)]
    for pick in itertools.product(*(table[j] for j in group.members)):
        held = dict(zip(group.members, (k for k, _ in pick), strict=True))
        gpus, value = sum(held.values()), sum(v for _, v in pick)
        fits = all(sum(held[j] for j in g.members) <= g.ceiling for g in inner)
        if fits and gpus <= capacity and (value > best or (value == best and gpus < least)):
            best, least = value, gpus
    return least


def by_type(seed):
    """Return the arguments of `integer.solve` for a random instance.

    The instance has up to five jobs, two or three GPU types, and sometimes a ceiling.
    """
    rng = np.random.default_rng(seed)
    jobs, kinds = int(rng.integers(1, 6)), int(rng.integers(2, 4))
    gpus, value, pool, start = [], [], [], [0]
    for _ in range(jobs):
        gpus, value, pool = [*gpus, 0], [*value, -1000.0], [*pool, -1]
        for k in range(kinds):
            speed = rng.uniform(0.3, 3)
            for size in range(1, int(rng.integers(1, 4)) + 1):
                gpus, pool = [*gpus, size], [*pool, k]
                value = [*value, -1 / (speed * size ** rng.uniform(0.3, 1))]
        start.append(len(gpus))
    capacity = rng.integers(0, 6, kinds).tolist()
    groups = []
    if rng.random() < 0.5:
        groups = [Group("lab", tuple(range((jobs + 1) // 2)), 0, int(rng.integers(0, 6)))]
    pools = integer.Pools(np.array(pool), capacity)
    return np.array(gpus), np.array(value), np.array(start), pools, groups


def best_by_type(gpus, value, start, pools, groups):
    best = -np.inf
    ranges = [range(a, b) for a, b in itertools.pairwise(start.tolist())]
    for picked in itertools.product(*ranges):
        chosen = np.array(picked)
        fits = all(
            gpus[chosen][pools.of_option[chosen] == k].sum() <= c for k, c in enumerate(pools.capacity)
        )
        fits &= all(gpus[chosen[list(g.members)]].sum() <= g.ceiling for g in groups)
        if fits:
            best = max(best, float(value[chosen].sum()))
    return best


def rough(jobs, seed):
    """Return options of 0 to 16 GPUs per job, rough and of falling returns.

    The values are utilities under p = -1.
    """
    rng = np.random.default_rng(seed)
    gpus, value, start = [], [], [0]
    for _ in range(jobs):
        own = [0, *sorted(rng.choice(np.arange(1, 17), size=int(rng.integers(2, 9)), replace=False).tolist())]
        speed = (
            np.array(own) ** rng.uniform(0.3, 1.0) * rng.uniform(0.2, 2.0) * rng.uniform(0.9, 1.1, len(own))
        )
        gpus += own
        value += (-1.0 / (speed + 1e-2)).tolist()
        start.append(len(gpus))
    return np.array(gpus), np.array(value), np.array(start)


def integer_optimum(gpus, value, start, capacity):
    """HiGHS to the end: one option per job within the capacity."""
    one = np.zeros((start.size - 1, gpus.size))
    for j in range(start.size - 1):
        one[j, start[j] : start[j + 1]] = 1
    found = milp(
        -value,
        integrality=np.ones(gpus.size),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one, 1, 1), LinearConstraint(gpus[None, :], 0, capacity)],
        options={"mip_rel_gap": 1e-7},
    )
    assert found.status == 0
    return -found.fun
