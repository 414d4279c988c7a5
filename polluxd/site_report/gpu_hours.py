"""Every GPU hour of a period by its cause: a sweep over Eligible, Start and End.

At each time a node's GPUs are held, or closed (down, drained, reserved), or idle. A waiting job is looked at by itself:
could it start on the idle GPUs of its partition? The idle GPUs of the cluster then go, as far as they reach, to the
demand that fits, to that which is split over too many nodes, to that which has room in other partitions alone, to that
for which too few are idle; the rest has no demand. Slurm knows more (CPUs, memory, limits, holds), which a job
that fits here may wait for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .job_log import FINISHED, RUNNING, STATES, JobLog, Numbers
from .machine import Closed, Holdings
from .step_functions import StepFunction, at, in_order, integrals, summed, together, turns, up_to

DEMANDS = ("fits", "fragments", "walls", "few")
CAUSES: Mapping[str, str] = {
    "finished": "held by jobs that completed",
    "running": "held by jobs that still ran at the end",
    "lost": "held by jobs that failed, timed out, were cancelled or lost their node",
    "fits": "idle, and a waiting job would have fitted",
    "fragments": "idle, waiting jobs would fit on fewer nodes than they need",
    "walls": "idle, waiting jobs may not use these partitions",
    "few": "idle, and too few for any waiting job",
    "no_demand": "idle, and nobody waited",
    "reserved": "reserved, and idle",
    "down": "down or drained",
}
"""In the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Waits:
    """For GPUs, within the period: one entry per record that waited."""

    at_once: Numbers
    """Records that did not wait: they started as soon as they were eligible."""
    record: Numbers
    begin: Numbers
    end: Numbers
    by_demand: Numbers
    """Seconds in which it would have fitted, and so on: a column for each of DEMANDS."""


@dataclass(frozen=True, slots=True)
class Division:
    """GPU seconds by cause and slice of the period."""

    edges: Numbers
    causes: Mapping[str, Numbers]
    """By the keys of CAUSES: GPU seconds between each two neighbouring edges."""
    lost: Mapping[str, float]
    """GPU seconds of lost work, by the state that jobs ended in."""
    excess: float
    """GPU seconds that records hold beyond what their nodes have; they count as capacity."""
    idle: StepFunction
    held: StepFunction
    waiting: StepFunction
    """GPUs over time."""
    waits: Waits

    def total(self, cause: str) -> float:
        return float(self.causes[cause].sum())

    @property
    def capacity(self) -> float:
        return sum(map(self.total, self.causes))


class _Idle:
    """Idle GPUs of all nodes over time, and of some nodes, from segments of each node's time."""

    def __init__(self, node: Numbers, begin: Numbers, idle: Numbers, holdings: Holdings) -> None:
        self._node, self._idle, self._of = node, idle, holdings
        self._first = np.diff(node, prepend=-1) != 0
        self._order = np.argsort(begin, kind="stable")  # once: each sum below goes through the same times
        self._begin = begin[self._order]
        self._sets: dict[tuple[str, str], Numbers] = {}
        self._total: dict[tuple[str, str], StepFunction] = {}
        self._nodes: dict[tuple[str, str, float], StepFunction] = {}
        self._turns: dict[tuple[object, ...], StepFunction] = {}

    def forget(self) -> None:
        """Drop what was worked out for the jobs of some partitions: it fills the memory, and others need theirs."""
        for kept in (self._sets, self._nodes, self._turns):
            kept.clear()
        self._total = {key: steps for key, steps in self._total.items() if key == ("", "")}

    def members(self, partition: str, kind: str) -> Numbers:
        """Return which nodes a job of these partitions may use; with a type of GPU, of the nodes that have it."""
        key = partition, kind
        if key not in self._sets:
            mine = set(partition.split(","))
            self._sets[key] = np.array(
                [
                    bool(mine & theirs) and (not kind or not has or kind in has.split("+"))
                    for theirs, has in zip(self._of.partitions, self._of.kind, strict=True)
                ],
                dtype=bool,
            )
        return self._sets[key]

    def summed(self, values: Numbers, chosen: Numbers | None = None) -> StepFunction:
        """Add up a value of the segments, over all nodes or over some."""
        change = np.diff(values, prepend=0.0)
        change[self._first] = values[self._first]
        if chosen is not None:
            change[~chosen[self._node]] = 0.0
        change = change[self._order]
        moved = np.flatnonzero(change)
        return in_order(self._begin[moved], change[moved])

    def total(self, key: tuple[str, str] | None) -> StepFunction:
        """Return the idle GPUs, of everybody's nodes or of those of `members`."""
        name = key or ("", "")
        if name not in self._total:
            self._total[name] = self.summed(self._idle, None if key is None else self.members(*key))
        return self._total[name]

    def enough(self, key: tuple[str, str], nodes: float, each: float) -> StepFunction:
        """Return when so many nodes had `each` idle GPUs or more."""
        of_nodes = (*key, each)
        if of_nodes not in self._nodes:
            self._nodes[of_nodes] = self.summed((self._idle >= each).astype(float), self.members(*key))
        return self._turned((*of_nodes, nodes), self._nodes[of_nodes], nodes)

    def at_least(self, key: tuple[str, str] | None, gpus: float) -> StepFunction:
        return self._turned((key, gpus), self.total(key), gpus)

    def _turned(self, name: tuple[object, ...], steps: StepFunction, least: float) -> StepFunction:
        if name not in self._turns:
            self._turns[name] = turns(steps, least)
        return self._turns[name]


def divided(
    records: JobLog,
    holdings: Holdings,
    closed: Sequence[Closed],
    edges: Sequence[float],
    *,
    nodes: Numbers | None = None,
    waiting: Numbers | None = None,
) -> Division:
    """Divide the GPU hours between the first and the last edge.

    Args:
        edges: POSIX times, ascending: the begin, the turns of months, the end.
        nodes: which nodes count, all by default.
        waiting: which records' waits count, all by default.
    """
    borders = np.asarray(edges, dtype=float)
    since, until = borders[0], borders[-1]
    mine = np.ones(len(holdings.names), dtype=bool) if nodes is None else nodes
    node, begin, held, shut, capacity = _segments(records, holdings, closed, (since, until), mine)
    end = np.append(begin[1:], until)
    end[np.append(node[1:] != node[:-1], True)[: len(node)]] = until
    excess = np.maximum(held - capacity, 0.0)
    free = np.maximum(capacity - held, 0.0)
    down, reserved = (np.where(shut == code, free, 0.0) for code in (1, 2))
    idle = np.where(shut == 0, free, 0.0)

    def seconds(values: Numbers) -> Numbers:
        kept = values > 0
        at_edges = np.concatenate([begin[kept], end[kept]])
        return integrals(summed(at_edges, np.concatenate([values[kept], -values[kept]])), borders)

    holding = _held(records, holdings, borders, mine)
    of_idle = _Idle(node, begin, idle, holdings)
    waits, demand = _demands(records, of_idle, (since, until), waiting)
    parts = _shared_out(of_idle.total(None), demand, borders)
    causes = {
        **{"finished": holding.pop(FINISHED, np.zeros(len(borders) - 1))},
        **{"running": holding.pop(RUNNING, np.zeros(len(borders) - 1))},
        **{"lost": sum(holding.values(), np.zeros(len(borders) - 1))},
        **parts,
        **{"reserved": seconds(reserved), "down": seconds(down)},
    }
    every, values = together([*demand, StepFunction(np.array([since]), np.zeros(1))])
    return Division(
        edges=borders,
        causes=causes,
        lost={state: float(part.sum()) for state, part in holding.items() if part.sum() > 0},
        excess=float((excess * (end - begin)).sum()),
        idle=of_idle.total(None),
        held=of_idle.summed(held),
        waiting=StepFunction(every, sum(values[:-1], np.zeros(len(every)))),
        waits=waits,
    )


def _segments(
    records: JobLog,
    holdings: Holdings,
    closed: Sequence[Closed],
    period: tuple[float, float],
    mine: Numbers,
) -> tuple[Numbers, ...]:
    """Return the segments of each node's time: node, begin, GPUs held, closed (1 down, 2 reserved), capacity."""
    since, until = period
    places = {name: number for number, name in enumerate(holdings.names) if mine[number]}
    shut = [each for each in closed if each.node in places and each.begin < until and each.end > since]
    own = mine[holdings.node]
    record, node, held = holdings.record[own], holdings.node[own], holdings.held[own]
    ended = np.where(np.isnan(records.end[record]), until, records.end[record])
    begin, end = (np.clip(times, since, until) for times in (records.start[record], ended))
    kept = end > begin
    node, held, begin, end = node[kept], held[kept].astype(float), begin[kept], end[kept]
    of_shut = np.array([places[each.node] for each in shut], dtype=np.int64)
    shut_begin = np.array([max(each.begin, since) for each in shut], dtype=float)
    shut_end = np.array([min(each.end, until) for each in shut], dtype=float)
    every = np.flatnonzero(mine & (holdings.gpus > 0))
    nodes = np.concatenate([every, node, node, of_shut, of_shut])
    times = np.concatenate([np.full(len(every), since), begin, end, shut_begin, shut_end])
    zero = [np.zeros(len(every)), np.zeros(2 * len(node))]
    holds = np.concatenate([zero[0], held, -held, np.zeros(2 * len(shut))])
    sort = np.lexsort((times, nodes))
    nodes, times = nodes[sort], times[sort]
    last = np.append((nodes[1:] != nodes[:-1]) | (times[1:] != times[:-1]), True) if len(nodes) else sort < 0
    level = np.cumsum(holds[sort])[last]
    closures = []
    for cause in ("down", "reserved"):
        chosen = np.array([float(each.cause == cause) for each in shut])
        changes = np.concatenate([*zero, chosen, -chosen])
        closures.append(np.cumsum(changes[sort])[last] > 0.5)
    code = np.where(closures[0], 1, np.where(closures[1], 2, 0))
    # A node's changes add up to nothing, so the sum over all nodes is the node's own.
    return nodes[last], times[last], np.round(level), code, holdings.gpus[nodes[last]]


def _held(records: JobLog, holdings: Holdings, edges: Numbers, mine: Numbers) -> dict[str, Numbers]:
    """Return GPU seconds held, by the state that the job ended in, and slice."""
    own = mine[holdings.node]
    record, held = holdings.record[own], holdings.held[own].astype(float)
    ended = np.where(np.isnan(records.end[record]), edges[-1], records.end[record])
    code = outcomes(records)[record]
    found = {}
    for state in np.unique(code):
        chosen = code == state
        times = np.concatenate([records.start[record][chosen], ended[chosen]])
        steps = summed(times, np.concatenate([held[chosen], -held[chosen]]))
        found[STATES[int(state)]] = integrals(steps, edges)
    return found


def outcomes(records: JobLog) -> Numbers:
    """Return each record's state as one of an end, or RUNNING: a resized job ends as its next record does."""
    code = records.state.copy()
    resizing, running = STATES.index("RESIZING"), STATES.index(RUNNING)
    if (code == resizing).any():
        order = np.lexsort((records.start, records.submit, records.job))
        for place in range(len(order) - 2, -1, -1):
            here, after = order[place], order[place + 1]
            if code[here] == resizing and records.job[here] == records.job[after]:
                code[here] = code[after]
    is_open = np.isin(code, [STATES.index(s) for s in ("SUSPENDED", "COMPLETING", "PENDING", "RESIZING")])
    return np.where(is_open | np.isnan(records.end), running, code)


def _demands(
    records: JobLog, idle: _Idle, period: tuple[float, float], waiting: Numbers | None
) -> tuple[Waits, list[StepFunction]]:
    """Return the waits, and the GPUs that waiting jobs ask for over time, a StepFunction for each of DEMANDS."""
    since, until = period
    stop = np.where(np.isnan(records.start), records.end, records.start)
    begin = np.clip(records.eligible, since, until)
    end = np.clip(np.where(np.isnan(stop), until, stop), since, until)
    chosen = waits_once(records) & (end > begin)  # NaN, never eligible, is no wait
    at_once = waits_once(records) & (records.eligible >= since) & (records.eligible < until)
    at_once &= (records.start <= records.eligible) & records.waits_known
    record, prompt = (np.flatnonzero(c if waiting is None else c & waiting) for c in (chosen, at_once))
    begin, end = begin[record], end[record]
    kinds = [records.codes[key][record] for key in ("partition", "type")]
    table = np.stack([*kinds, records.nodes[record], records.gpus[record]]).astype(np.int64)
    classes, of = np.unique(table, axis=1, return_inverse=True)
    order = np.argsort(of.ravel(), kind="stable")
    bounds = np.searchsorted(of.ravel()[order], np.arange(classes.shape[1] + 1))
    found, changes = np.zeros((len(record), len(DEMANDS))), [[(np.zeros(0), np.zeros(0))] for _ in DEMANDS]
    key = ("", "")
    for number in range(classes.shape[1]):
        partition, kind, nodes, gpus = classes[:, number].tolist()
        own = order[bounds[number] : bounds[number + 1]]
        last, key = key, (records.names["partition"][partition], records.names["type"][kind])
        if key != last:
            idle.forget()
        tests = (
            idle.enough(key, nodes, -(-gpus // nodes)),
            idle.at_least(key, gpus),
            idle.at_least(None, gpus),
        )
        tasks = records.tasks[record[own]]
        for place, (seconds, times, values) in enumerate(_of_class(begin[own], end[own], tasks, tests)):
            found[own, place] = seconds
            moved = np.diff(values * gpus, prepend=0.0)
            changes[place].append((times[moved != 0], moved[moved != 0]))
    demand = [summed(*(np.concatenate(part) for part in zip(*each, strict=True))) for each in changes]
    return Waits(prompt, record, begin, end, found), demand


def waits_once(records: JobLog) -> Numbers:
    """Say which records have a wait of their own: a resized job's further records have not."""
    order = np.lexsort((records.start, records.submit, records.job))
    again = np.zeros(len(order), dtype=bool)
    job, submit = records.job[order], records.submit[order]
    again[order[1:]] = (job[1:] == job[:-1]) & (submit[1:] == submit[:-1])
    once: Numbers = ~again | (records.tasks > 1)
    return once


def _of_class(
    begin: Numbers, end: Numbers, tasks: Numbers, tests: Sequence[StepFunction]
) -> list[tuple[Numbers, Numbers, Numbers]]:
    """Return, for each of DEMANDS: the seconds of each wait, and times and numbers of jobs that wait so."""
    queue = summed(np.concatenate([begin, end]), np.concatenate([tasks, -tasks]))
    times = np.unique(np.concatenate([queue.times, *(_within(steps.times, queue) for steps in tests)]))
    many = at(queue, times)
    fits, near, anywhere = (at(steps, times) > 0 for steps in tests)
    status = np.where(fits, 0, np.where(near, 1, np.where(anywhere, 2, 3)))
    found = []
    for place in range(len(DEMANDS)):
        so = (status == place).astype(float)
        spent = StepFunction(times, so)
        found.append((up_to(spent, end) - up_to(spent, begin), times, so * many))
    return found


def _within(times: Numbers, queue: StepFunction) -> Numbers:
    """Return those of the times at which somebody of the queue waits."""
    busy = turns(queue, 0.5)
    first, last = np.searchsorted(times, busy.times[::2]), np.searchsorted(times, busy.times[1::2])
    sizes = last - first
    offsets = np.repeat(first - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes)
    within: Numbers = times[offsets + np.arange(sizes.sum())]
    return within


def _shared_out(idle: StepFunction, demand: Sequence[StepFunction], edges: Numbers) -> dict[str, Numbers]:
    times, (left, *asked) = together([idle, *demand])
    found = {}
    for name, wanted in zip(DEMANDS, asked, strict=True):
        taken = np.minimum(left, wanted)
        left = left - taken
        found[name] = integrals(StepFunction(times, taken), edges)
    return found | {"no_demand": integrals(StepFunction(times, left), edges)}
