"""The nodes of a cluster over a period: GPUs, partitions, and when nobody could use them.

From `scontrol show nodes -o`, `sacctmgr show event` and `sacctmgr show reservation`; without the first, from the
places that jobs had.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pollux.private_folder import read_named
from polluxd.errors import SlurmGarbled
from polluxd.sim.workload import TraceError
from polluxd.slurm.notation import node_names, parse_gpus
from polluxd.slurm.sacct_text import NoSacctText, moment, rows
from polluxd.slurm.states import schedulable

from .job_log import JobLog, Numbers

NODES_COMMAND = "TZ=UTC0 SLURM_TIME_FORMAT=%s scontrol show nodes -o"
_FIELD = re.compile(r"(?:^|\s)(NodeName|Gres|Partitions|State|Reason)=(.*?)(?=\s\w+=|$)")
_SINCE = re.compile(r"@([0-9T:-]{1,25})\]\s*$")
_OF_RESERVATIONS = ("NodeName", "TimeStart", "TimeEnd")
"""As sacctmgr writes them, whatever it was asked for."""
_OF_EVENTS = (*_OF_RESERVATIONS, "State")


def events_command(since: str, until: str) -> str:
    return (
        "TZ=UTC0 SLURM_TIME_FORMAT=%s sacctmgr --parsable2 show event "
        f"start={since} end={until} format={','.join(_OF_EVENTS)}"
    )


def reservations_command(since: str, until: str) -> str:
    return (
        "TZ=UTC0 SLURM_TIME_FORMAT=%s sacctmgr --parsable2 show reservation "
        f"start={since} end={until} format=NodeNames,Start,End"
    )


@dataclass(frozen=True, slots=True)
class Closed:
    """A time in which a node was down or drained, or reserved."""

    node: str
    begin: float
    end: float
    cause: str
    """`down` or `reserved`."""


@dataclass
class Nodes:
    """What the files of a site say of its nodes, by node name."""

    gpus: dict[str, int] = field(default_factory=dict)
    kind: dict[str, str] = field(default_factory=dict)
    partitions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    closed: list[Closed] = field(default_factory=list)
    unreadable: int = 0


def read_nodes(nodes: Nodes, text: str) -> None:
    """Add what `scontrol show nodes -o` says. A node that is closed now is closed since the time in its reason."""
    for line in filter(None, map(str.strip, text.splitlines())):
        found = dict(_FIELD.findall(line))
        try:
            name, gpus = found["NodeName"].strip(), parse_gpus(found.get("Gres", "").strip())
            if not schedulable(found.get("State", "").strip()) and (
                since := _SINCE.search(found.get("Reason", ""))
            ):
                nodes.closed.append(Closed(name, moment(since[1]) or 0.0, np.inf, "down"))
        except (KeyError, SlurmGarbled, ValueError):
            nodes.unreadable += 1
            continue
        nodes.gpus[name], nodes.kind[name] = gpus.count, gpus.type
        nodes.partitions[name] = tuple(filter(None, found.get("Partitions", "").strip().split(",")))


def read_closed(nodes: Nodes, path: Path) -> str:
    """Add the events or the reservations of a file of sacctmgr's; say which cause they are.

    Raises TraceError for another file.
    """
    try:
        names, found = rows(path, ())
        if not set(_OF_RESERVATIONS) <= set(names):
            raise NoSacctText(f"expected the columns {', '.join(_OF_RESERVATIONS)}")
    except NoSacctText as error:
        raise TraceError(
            f"{path}, line 1: {error}; make it with: {events_command('TIME', 'TIME')} "
            f"(or {reservations_command('TIME', 'TIME')})"
        ) from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    cause = "down" if set(_OF_EVENTS) <= set(names) else "reserved"
    for _, fields in found:
        if fields is None:
            nodes.unreadable += 1
            continue
        row = dict(zip(names, fields, strict=True))
        try:
            who, begin, end = (row[column] for column in _OF_RESERVATIONS)
            first, last = moment(begin), moment(end)
            # An event without a node is one of the whole cluster, such as a start of slurmctld.
            for name in node_names(who) if first is not None else ():
                nodes.closed.append(Closed(name, first or 0.0, np.inf if last is None else last, cause))
        except (SlurmGarbled, ValueError):
            nodes.unreadable += 1
    return cause


def text_of(path: Path) -> str:
    """Return a file's text. Raises TraceError."""
    try:
        return read_named(path).decode("utf-8", "replace")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}); check the path") from None


@dataclass(frozen=True, slots=True)
class Holdings:
    """Stretches of GPUs that jobs held on nodes, and the nodes."""

    names: Sequence[str]
    gpus: Numbers
    """Of each node, as far as is known."""
    kind: Sequence[str]
    partitions: Sequence[frozenset[str]]
    record: Numbers
    """Of each stretch: the record, the node (a place in `names`), and how many GPUs."""
    node: Numbers
    held: Numbers
    guessed: int
    """Nodes whose GPUs are the most that jobs held at a time."""


def placed(records: JobLog, nodes: Nodes) -> Holdings:
    """Divide each started job's GPUs over its nodes, evenly; a job without places is on a node of its partition's."""
    names: dict[str, int] = {name: number for number, name in enumerate(nodes.gpus) if nodes.gpus[name]}
    started = np.flatnonzero(~np.isnan(records.start))
    places, partitions = records.names["places"], records.names["partition"]
    seen: dict[int, set[str]] = {}
    of_place: dict[tuple[int, int], list[int]] = {}
    counts, found = np.empty(len(started), dtype=np.int64), []
    pairs = zip(
        records.codes["places"][started].tolist(), records.codes["partition"][started].tolist(), strict=True
    )
    for position, pair in enumerate(pairs):
        if pair not in of_place:
            of_place[pair] = [
                names.setdefault(name, len(names)) for name in _names(places[pair[0]], partitions[pair[1]])
            ]
            for number in of_place[pair]:
                seen.setdefault(number, set()).update(partitions[pair[1]].split(","))
        found.append(of_place[pair])
        counts[position] = len(of_place[pair])
    record = np.repeat(started, counts)
    node = np.fromiter((number for each in found for number in each), dtype=np.int64, count=int(counts.sum()))
    first = np.repeat(np.cumsum(counts) - counts, counts)
    share = np.repeat(counts, counts)
    total = records.gpus[record]
    held = total // share + (np.arange(len(record)) - first < total % share)
    known = np.array([nodes.gpus.get(name, 0) for name in names], dtype=float)
    guessed = [number for number, name in enumerate(names) if not nodes.gpus.get(name)]
    most = _most_held(records, record, node, held, len(names))
    known[guessed] = most[guessed]
    return Holdings(
        names=tuple(names),
        gpus=known,
        kind=[nodes.kind.get(name, "") for name in names],
        partitions=[
            frozenset(nodes.partitions.get(name) or seen.get(number) or ())
            for number, name in enumerate(names)
        ],
        record=record,
        node=node,
        held=held,
        guessed=len(guessed),
    )


def _names(places: str, partition: str) -> Iterable[str]:
    try:
        found = node_names(places) if places != "None assigned" else ()
    except SlurmGarbled:
        found = ()
    return found or (f"(nodes of {partition})",)


def _most_held(records: JobLog, record: Numbers, node: Numbers, held: Numbers, count: int) -> Numbers:
    """Return the most GPUs that jobs held at a time, by node."""
    end = np.where(np.isnan(records.end), np.inf, records.end)[record]
    at = np.concatenate([records.start[record], end])
    change, where = np.concatenate([held, -held]), np.concatenate([node, node])
    order = np.lexsort((change, at, where))  # what ends at a time ends before what begins
    level = np.cumsum(change[order])
    most = np.zeros(count)
    np.maximum.at(most, where[order], level)
    return most
