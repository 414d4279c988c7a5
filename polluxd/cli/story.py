"""What `polluxctl explain` tells of a job, in sentences. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polluxd.model import Allocation, DaemonMode, Explanation, Report
from polluxd.policy.feasible import GROWTH
from polluxd.store import JobExplanation

from .output import count, duration, number
from .table_rows import is_silent

DATA_BOUND = 0.1
"""Share of the time spent waiting for data from which a sentence speaks of it."""

LIMITS = {
    "contention": "other jobs, to which every GPU is worth more",
    "move-cost": "the cost of a move, for which more GPUs would not make up",
    "goodput": "the job's own scaling: more GPUs would not raise its goodput",
    "exploration": f"exploration: a job may take {'twice' if GROWTH == 2 else f'{GROWTH} times'} the GPUs on which it "
    "was measured, and more after it was measured there",
    "progress": "its progress, which polluxd has yet to see on the GPUs that the job holds: it gets none beyond its "
    "user's equal share until then",
    "batch": "the job's batch limits: the largest batch does not divide over more GPUs",
    "counts": "the numbers of GPUs that the job may be given (gpu-counts)",
    "nodes": "the nodes in service: no larger placement fits on them",
    "ceiling": "the GPU ceiling of its account or user",
    "fragmentation": "fragmentation: GPUs are free, but not in a placement that the job can use",
}
"""What keeps a job from more GPUs, by `Explanation.limit`."""

OWNER = {
    "contention": "Nothing is to do: it grows when they end.",
    "move-cost": "Nothing is to do: it moves once that pays.",
    "goodput": "Fewer GPUs do as well; a larger max_batch_size or faster loading may make more worth it.",
    "exploration": "Nothing is to do: it grows after some minutes of training.",
    "progress": "Nothing is to do if it trains: `job.step` reports the progress.",
    "batch": "A larger max_batch_size in the script lets it use more GPUs.",
    "counts": "A wider gpu-counts in its #POLLUX line allows more.",
    "nodes": "Nothing is to do while the nodes that are missing are down, drained or of another type.",
    "ceiling": "Only an administrator can raise it.",
    "fragmentation": "Nothing is to do: it grows when whole nodes become free.",
    "max-gpus": "A larger max-gpus in its #POLLUX line allows more.",
}
"""What the job's owner can do about it."""


def story(
    row: Mapping[str, Any],
    found: JobExplanation,
    settings: Mapping[str, Any],
    others: Sequence[Allocation],
) -> Iterator[str]:
    """Yield the one sentence that matters (`gist`), and then all else in sentences.

    `others`: the decisions of the same cycle, on this and other jobs.
    """
    placed = found.allocation
    yield gist(row, found, paused=settings["paused"])
    if row["ended_at"] is None:
        if found.job.left_alone:
            yield f"polluxd leaves this job alone: {found.job.left_alone}."
        elif placed is not None and found.cycle is not None:
            ago = duration(time.time() - found.cycle.started_at)
            idle = _not_acting(found.cycle.mode, paused=settings["paused"])
            yield f"Decided {ago} ago (cycle {found.cycle.id}{idle}): {placed.reason}"
            if placed.speedup and found.report is not None and found.report.params is not None:
                yield f"Predicted speedup against the fair share: {number(3)(placed.speedup)}."
            yield from sentences(placed, others, found.job.spec.max_gpus)
        else:
            yield (
                "polluxd has not decided on this job yet. It does in the first cycle in which the job may start: no "
                "hold, no dependency and no --begin keep it back, and its array task has a record of its own."
            )
        yield from _measured(row, found.report, found.rejected)
    if is_silent(row):
        job, held = row["job_id"], count(row["gpus"], "GPU")
        yield (
            f"It has held {held} for {duration(row['silent_s'])} without a training step reported. It keeps the GPUs, "
            "since it may train unseen. Look at the job's output and at `polluxctl doctor` on its node. "
            f"`scontrol requeue {job}` starts the job again on min-gpus, `scancel {job}` ends it."
        )
    yield from _advice(row)
    if row["moving"]:
        yield f"Moving now, step {row['moving']}: {found.job.move_reason or 'no reason recorded'}"
    elif found.job.move_step == "failed":
        yield f"The last move failed: {found.job.move_detail or 'no detail recorded'}"
    if row["moves"]:
        yield f"Moved {count(row['moves'], 'time')}; the moves cost {duration(row['lost_s'])}."
    if settings["paused"]:
        yield "polluxd is paused: it moves nothing until `polluxctl resume`."


def gist(row: Mapping[str, Any], found: JobExplanation, *, paused: bool) -> str:
    """Say what the job has, what keeps it from more, and what its owner can do: the first that is true of these."""
    job, placed = row["job_id"], found.allocation
    who = f"Job {job} ({row['name']}) of {row['user']}"
    if row["ended_at"] is not None:
        return _ended(who, job, row["state"])
    held = f"{count(row['gpus'], 'GPU')} on {row['nodes']}" if row["gpus"] else "no GPUs"
    has = f"{who}: {str(row['state']).lower()}, holds {held}"
    facts = placed.explanation if placed is not None else None
    if found.job.left_alone:
        return f"{has}. polluxd leaves it alone: {found.job.left_alone}."
    if is_silent(row):
        return (
            f"{has}, and has reported no training step for {duration(row['silent_s'])}. Look at its output."
        )
    if found.rejected:
        return f"{has}. polluxd cannot use its latest report: {found.rejected}."
    if found.job.move_step == "failed" and found.job.move_detail:
        return f"{has}. Its last move failed: {found.job.move_detail}."
    if paused:
        return f"{has}. polluxd is paused: it moves nothing until an administrator's `polluxctl resume`."
    if found.report is None and row["gpus"]:
        return f"{has}, and has not reported yet: it has not finished its first steps since `pollux.attach`."
    if placed is None or facts is None:
        return f"{has}."
    if facts.limit == "stays":
        return f"{has}, and keeps what it has: {_stays(placed)}."
    limit = facts.limit
    cause = f"max-gpus={found.job.spec.max_gpus}" if limit == "max-gpus" else LIMITS.get(limit, limit)
    kept = "What keeps it from more" if row["gpus"] else "What it waits for"
    return f"{has}. {kept}: {cause}. {OWNER.get(limit, '')}".rstrip()


def _stays(placed: Allocation) -> str:
    """What keeps a job where it is: it stands behind the colon of its reason."""
    return placed.reason.partition(": ")[2] or placed.reason


def _ended(who: str, job: int, state: str) -> str:
    if state == "COMPLETED":
        return f"{who} has ended: {state}."
    if state != "GONE":
        return (
            f"{who} has ended: {state}. `sacct -j {job} -o State,ExitCode,End` has its exit status or signal, and its "
            f"output the cause. Its checkpoints stay: a new job with checkpoint_dir= of their folder goes on."
        )
    return (
        f"{who} is no Pollux job of Slurm's any more: it ended while polluxd was away, or its AdminComment had lost "
        "Pollux' mark when polluxd started."
    )


def _advice(row: Mapping[str, Any]) -> Iterator[str]:
    """Say what the agent leaves alone in modes observe and advise."""
    advice = row["advice"]
    if row["mode"] == "observe":
        yield "The agent only measures (mode observe): batch size and learning rate stay the user's."
    elif row["mode"] == "advise" and advice is None:
        yield "The agent changes nothing (mode advise). It knows no better batch size so far."
    elif row["mode"] == "advise":
        yield (
            f"The agent changes nothing (mode advise). Batches of {advice['batch_size']:.0f} "
            f"({advice['local_batch']:.0f} per GPU and pass) would bring {100 * (advice['goodput_ratio'] - 1):.0f} % "
            "more goodput."
        )


def _not_acting(mode: str, *, paused: bool) -> str:
    """Say that the decision is not carried out, where that is so."""
    if mode == DaemonMode.OBSERVE:
        return "; not carried out, since polluxd runs in mode observe"
    return "; not carried out, since polluxd is paused" if paused else ""


def _measured(row: Mapping[str, Any], report: Report | None, rejected: str) -> Iterator[str]:
    if rejected:
        yield f"polluxd ignores the job's latest report: {rejected}."
        return
    if report is None:
        yield "The job has not reported yet: it has not reached `pollux.attach`, or not finished its first steps."
        return
    if row["goodput"]:
        yield (
            f"Measured goodput, in its last report: {number(3)(report.goodput)} examples/s; batch size "
            f"{report.batch_size} (submitted with {report.limits.initial}), learning "
            f"rate x{number(3)(report.lr_factor)}."
        )
    if report.prior_gpus:
        yield (
            f"Earlier runs of the same training, on up to {count(report.prior_gpus, 'GPU')}, stand in for what the job "
            "has not measured yet."
        )
    if report.data_wait is not None and report.data_wait >= DATA_BOUND:
        yield (
            f"The job waits for its data loader {100 * report.data_wait:.0f} % of the time. More GPUs do not help; "
            "more loader workers or faster storage may."
        )
    if report.noise is not None:
        yield f"Gradient noise scale: {number(3)(report.noise.phi(report.limits.initial))} examples."


def sentences(placed: Allocation, others: Sequence[Allocation], max_gpus: int | None) -> Iterator[str]:
    """Yield why a decision gives a job its GPUs; nothing for a job outside the decision."""
    facts = placed.explanation
    if facts is None:
        return
    share = f"{count(facts.fair_gpus, 'GPU')} on {count(facts.fair_nodes, 'node')}"
    weight = f" Weight: {facts.weight:.3g} times the average job's." if facts.weight != 1.0 else ""
    yield f"Fair share: {share}.{weight}"
    limit = f"max-gpus={max_gpus}" if facts.limit == "max-gpus" and max_gpus is not None else facts.limit
    yield f"Limit: {_stays(placed) if limit == 'stays' else LIMITS.get(limit, limit)}."
    if facts.next_gpus is not None and facts.limit != "stays":
        gain = ""
        if placed.goodput > 0:
            gain = f" ({100 * (facts.next_goodput / placed.goodput - 1):+.0f} % against {number(3)(placed.goodput)})"
        size = count(facts.next_gpus, "GPU")
        yield f"Next larger size: {size}, fitted goodput {number(3)(facts.next_goodput)} examples/s{gain}."
        yield from _marginal(facts, others)
    yield _move(facts)


def _marginal(facts: Explanation, others: Sequence[Allocation]) -> Iterator[str]:
    """Compare what more GPUs would add here with what the GPUs in use add."""
    if facts.taken_by is None or facts.price <= 0:
        return
    taker = next((a for a in others if a.job_id == facts.taken_by), None)
    has = ""
    if taker is not None and taker.placement:
        has = f" ({count(taker.placement.gpus, 'GPU')}, {number(3)(taker.speedup)} times the goodput of its fair share)"
    # Near the margin the next size here and the last one there need not fit into each other.
    outcome = (
        "but more than this job would gain"
        if facts.price > facts.marginal
        else "but polluxd found no exchange of whole sizes that pays"
    )
    yield (
        f"One more GPU would bring this job {100 * facts.marginal / facts.price:.0f} % of what the least useful GPU in "
        f"use brings to its job. Job {facts.taken_by}{has} would lose least by giving up GPUs, {outcome}."
    )


def _move(facts: Explanation) -> str:
    if facts.move_seconds <= 0:
        return "The job has not run yet: starting it costs nothing."
    cost = f"A move would cost about {duration(facts.move_seconds)} of training."
    if not 0 < facts.move_factor < 1:
        return cost
    return f"{cost} To pay for it, other GPUs must bring at least {100 / facts.move_factor - 100:.2g} % more."
