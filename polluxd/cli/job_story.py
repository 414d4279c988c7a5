"""`polluxctl explain JOB`: what a job has, why, and other sizes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import mode
from typing import Any

from pollux.goodput import Goodput
from polluxd.model import Allocation, DaemonMode, Report
from polluxd.store import JobExplanation

from . import why
from .output import Column, count, duration, number
from .table_rows import is_silent

SIZE_COLUMNS = (
    Column("gpus", "GPUS", right=True),
    Column("nodes", "NODES", right=True),
    Column("goodput", "GOODPUT", number(3), right=True),
    Column("relative", "AGAINST NOW", lambda v: "-" if v is None else f"{v:.2f}x", right=True),
    Column("batch_size", "BATCH", right=True),
    Column("note", "NOTE", flexible=True, rank=1),
)

DATA_BOUND = 0.1
"""Share of the time spent waiting for data from which `explain` speaks of it."""

_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def fit_type(snapshot: Mapping[str, Any] | None, report: Report | None) -> str:
    """Return the GPU type of the job's fit; empty in a cluster of one type."""
    types = {node.get("gpu_type", "") for node in (snapshot or {}).get("nodes", ()) if node["gpus"]}
    return report.gpu_type if report is not None and len(types) > 1 and report.gpu_type in types else ""


def node_size(snapshot: Mapping[str, Any] | None, report: Report | None) -> tuple[int, int]:
    """Return the GPUs of a usual node and of all nodes.

    They come from the stored snapshot of the cycle, or from the job where there is none.

    Of the nodes of `fit_type`, where that is one.
    """
    own = fit_type(snapshot, report)
    nodes = [node for node in (snapshot or {}).get("nodes", ()) if not own or node.get("gpu_type", "") == own]
    gpus = [int(node["gpus"]) for node in nodes if node["gpus"]]
    if gpus:
        return mode(gpus), sum(gpus)
    held = report.gpus // max(report.nodes, 1) if report else 0
    return max(held, 1), max(report.gpus if report else 0, 1)


def _shapes(held: tuple[int, int], per_node: int, largest: int) -> list[tuple[int, int]]:
    """Return the sizes to show, as (nodes, GPUs).

    Powers of two within a node, then whole nodes, and the size that the job has.
    """
    shapes = {held} if held[1] else set()
    shapes |= {(1, gpus) for gpus in _COUNTS if gpus <= min(per_node, largest)}
    shapes |= {(nodes, nodes * per_node) for nodes in _COUNTS if nodes * per_node <= largest}
    return sorted(shapes, key=lambda shape: (shape[1], shape[0]))


def sizes(found: JobExplanation, per_node: int, cluster_gpus: int) -> list[dict[str, Any]]:
    """Predict goodput at other sizes, by the job's own fit.

    Sizes go up to the job's limit, and to four times the size at which it was measured. The list is empty until the
    job has reported a fit. Several nodes count as one rack. For a job measured over racks, `over_racks` has the
    goodput there, and the present size counts as it is.
    """
    report, spec = found.report, found.job.spec
    if report is None or report.params is None or found.job.ended_at is not None:
        return []
    known = max(report.explored_gpus, report.prior_gpus)
    largest = min(spec.max_gpus or cluster_gpus, cluster_gpus, 4 * max(known, report.gpus, 1))
    shapes = _shapes((report.nodes, report.gpus), per_node, largest)
    model = Goodput(report.params, report.noise, report.limits, adaptive=spec.adaptive)
    nodes_of, gpus_of = [n for n, _ in shapes], [k for _, k in shapes]
    best, apart = (model.optimize(nodes_of, gpus_of, racks) for racks in (1, 2))
    racked = report.params.alpha_rack is not None
    seen = apart.goodput if racked and _over_racks(found) else best.goodput
    now = next((float(g) for s, g in zip(shapes, seen, strict=True) if s == (report.nodes, report.gpus)), 0.0)
    rows = []
    for (nodes, gpus), goodput, afar, batch in zip(
        shapes, best.goodput, apart.goodput, best.batch_size, strict=True
    ):
        note = "" if goodput > 0 else "no batch size fits"
        if (nodes, gpus) == (report.nodes, report.gpus):
            note = "now"
        elif report.explored_gpus < gpus <= report.prior_gpus:
            note = note or "as earlier runs measured it"
        elif gpus > report.explored_gpus:
            note = note or f"a guess: measured up to {count(report.explored_gpus, 'GPU')} only"
        over = float(afar) if racked and nodes > 1 and afar > 0 else None
        if over is not None:
            note = f"{note}{'; ' if note else ''}{number(3)(over)} over several racks"
        rows.append(
            {
                "gpus": gpus,
                "nodes": nodes,
                "goodput": float(goodput) or None,
                "relative": float(goodput) / now if now > 0 and goodput > 0 else None,
                "batch_size": int(batch) or None,
                "over_racks": over,
                "note": note,
            }
        )
    return rows


def _over_racks(found: JobExplanation) -> bool:
    """Say whether the job's present nodes lie in several racks."""
    placed, report = found.allocation, found.report
    if placed is None or placed.explanation is None or report is None:
        return False
    here = (len(placed.placement.nodes), placed.placement.gpus) == (report.nodes, report.gpus)
    return here and placed.explanation.racks > 1


def decision(found: JobExplanation) -> dict[str, Any] | None:
    """Return the newest decision on the job; None before the first."""
    if found.allocation is None:
        return None
    placed, cycle = found.allocation, found.cycle
    return {
        "cycle": cycle.id if cycle else None,
        "at": cycle.started_at if cycle else None,
        "mode": cycle.mode if cycle else None,
        "placement": str(placed.placement),
        "gpus": placed.placement.gpus,
        "goodput": placed.goodput,
        "speedup": placed.speedup,
        "batch_size": placed.batch_size,
        "changed": placed.changed,
        "reason": placed.reason,
        "explanation": asdict(placed.explanation) if placed.explanation else None,
    }


def story(
    row: Mapping[str, Any],
    found: JobExplanation,
    settings: Mapping[str, Any],
    others: Sequence[Allocation] = (),
    more: Allocation | None = None,
) -> list[str]:
    """Answer what a person asks first, in sentences.

    `others`: the decisions of the same cycle, on this and other jobs; `more`: what the job would get of one node more.
    """
    held = f"{count(row['gpus'], 'GPU')} on {row['nodes']}" if row["gpus"] else "no GPUs"
    lines = [
        f"Job {row['job_id']} ({row['name']}) of {row['user']}: {str(row['state']).lower()}, holds {held}."
    ]
    if row["ended_at"] is not None:
        lines[0] = f"Job {row['job_id']} ({row['name']}) of {row['user']} has ended: {row['state']}."
    placed = found.allocation
    if placed is not None and found.cycle is not None and row["ended_at"] is None:
        ago = duration(time.time() - found.cycle.started_at)
        idle = _not_acting(found.cycle.mode, paused=settings["paused"])
        lines.append(f"Decided {ago} ago (cycle {found.cycle.id}{idle}): {placed.reason}")
        if placed.speedup:
            lines.append(f"Predicted speedup against the fair share: {number(3)(placed.speedup)}.")
        lines += why.sentences(placed, others, found.job.spec.max_gpus)
        lines += why.doubts(placed)
        lines += [line for line in [why.with_node_more(placed, more)] if line]
    elif row["ended_at"] is None:
        lines.append("polluxd has not decided on this job yet. The next cycle will.")
    lines += _measured(row, found.report, found.rejected)
    lines += _silent(row)
    lines += _agent(row)
    if row["moving"]:
        lines.append(f"Moving now, step {row['moving']}: {found.job.move_reason or 'no reason recorded'}")
    elif found.job.move_step == "failed":
        lines.append(f"The last move failed: {found.job.move_detail or 'no detail recorded'}")
    if row["moves"]:
        lines.append(f"Moved {count(row['moves'], 'time')}; the moves cost {duration(row['lost_s'])}.")
    if settings["paused"]:
        lines.append("polluxd is paused: it moves nothing until `polluxctl resume`.")
    return lines


def _not_acting(mode: str, *, paused: bool) -> str:
    """Say that the decision is not carried out, where that is so."""
    if mode == DaemonMode.OBSERVE:
        return "; not carried out, since polluxd runs in mode observe"
    return "; not carried out, since polluxd is paused" if paused else ""


def _measured(row: Mapping[str, Any], report: Report | None, rejected: str) -> list[str]:
    if row["ended_at"] is not None:
        return []
    if rejected:
        return [f"polluxd ignores the job's latest report: {rejected}."]
    if report is None:
        return [
            "The job has not reported yet: it has not reached `pollux.attach`, or not finished its first steps."
        ]
    lines = []
    if row["goodput"]:
        lines.append(
            f"Measured: goodput {number(3)(report.goodput)} examples/s, batch size {report.batch_size} "
            f"(submitted with {report.limits.initial}), learning rate x{number(3)(report.lr_factor)}."
        )
    if report.prior_gpus:
        lines.append(
            f"Earlier runs of the same training, on up to {count(report.prior_gpus, 'GPU')}, stand in for what the job "
            "has not measured yet."
        )
    if report.data_wait is not None and report.data_wait >= DATA_BOUND:
        lines.append(
            f"The job waits for its data loader {100 * report.data_wait:.0f} % of the time. More GPUs do not help; "
            "more loader workers or faster storage may."
        )
    if report.noise is not None:
        phi = report.noise.phi(report.limits.initial)
        lines.append(f"Gradient noise scale: {number(3)(phi)} examples.")
    return lines


def _silent(row: Mapping[str, Any]) -> list[str]:
    """Say what to do about a job that trains unseen, or not at all."""
    if not is_silent(row):
        return []
    job, held = row["job_id"], count(row["gpus"], "GPU")
    return [
        f"It has held {held} for {duration(row['silent_s'])} without a training step reported. It keeps the GPUs, "
        "since it may train unseen. Look at the job's output and at `polluxctl doctor` on its node. "
        f"`scontrol requeue {job}` starts the job again on min-gpus, `scancel {job}` ends it."
    ]


def _agent(row: Mapping[str, Any]) -> list[str]:
    """Say what the agent leaves alone in modes observe and advise."""
    advice = row["advice"]
    if row["mode"] == "observe":
        return ["The agent only measures (mode observe): batch size and learning rate stay the user's."]
    if row["mode"] != "advise":
        return []
    if advice is None:
        return ["The agent changes nothing (mode advise). It knows no better batch size so far."]
    return [
        f"The agent changes nothing (mode advise). Batches of {advice['batch_size']:.0f} ({advice['local_batch']:.0f} "
        f"per GPU and pass) would bring {100 * (advice['goodput_ratio'] - 1):.0f} % more goodput."
    ]
