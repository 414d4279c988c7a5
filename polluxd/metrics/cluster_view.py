"""The gauges of the cluster, computed from one decision. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from polluxd.apply.idle_watch import IdleGpus
from polluxd.model import JobState, Move, Plan, Report, Snapshot
from polluxd.slurm.protocol import ClusterState

STALE_S = 180.0
"""Agents report every 30 s: six reports in a row are missing."""

Values = dict[str, Mapping[str, float]]


def of_cluster(state: ClusterState) -> Values:
    """Count jobs by state, and GPUs by who holds them."""
    ours = [job for job in state.jobs if job.spec is not None and not job.state.finished]
    held: Counter[str] = Counter()
    for job in ours:
        held.update(job.gpus_per_node_held)
    gpus: Counter[str] = Counter()
    for node in state.nodes:
        free = max(node.gpus - node.foreign_gpus - held[node.name], 0)
        gpus.update(
            pollux=held[node.name],
            other=node.foreign_gpus,
            **{"free" if node.schedulable else "closed": free},
        )
    return {"polluxd_jobs": Counter(job.state.value for job in ours), "polluxd_gpus": gpus}


def of_reports(
    state: ClusterState,
    reports: Mapping[int, Report],
    rejected: Iterable[int],
    doubted: Iterable[int],
) -> Values:
    """Count running jobs by the state of their newest report.

    Args:
        rejected: jobs with an unusable report.
        doubted: jobs with a claim that polluxd does not believe.
    """
    unusable, doubtful = frozenset(rejected), frozenset(doubted)
    count: Counter[str] = Counter()
    goodput = 0.0
    for job in state.jobs:
        if job.spec is None or job.state is not JobState.RUNNING:
            continue
        report = reports.get(job.job_id)
        if job.job_id in unusable:
            count["rejected"] += 1
        elif report is None or report.attempt != job.restart_count:
            count["missing"] += 1
        elif state.taken_at - report.at > STALE_S:
            count["stale"] += 1
        else:
            count["doubted" if job.job_id in doubtful else "fresh"] += 1
            goodput += report.goodput
    return {"polluxd_reports": count, "polluxd_goodput_examples_per_second": {"": goodput}}


def of_plan(plan: Plan, snapshot: Snapshot) -> Values:
    speedups = [a.speedup for a in plan.allocations if a.placement]
    return {
        "polluxd_fitness": {snapshot.settings.objective: plan.objective},
        "polluxd_solver_gap_ratio": {"": plan.gap},
        "polluxd_mean_speedup": {"": sum(speedups) / len(speedups)} if speedups else {},
        "polluxd_gpu_price": {"": max(plan.gpu_prices.values())} if plan.gpu_prices else {},
        "polluxd_paused": {"": float(snapshot.settings.paused)},
        "polluxd_last_successful_cycle_timestamp_seconds": {"": snapshot.taken_at},
    }


def of_moves(moves: Sequence[Move], stuck: Sequence[Move], refused: Iterable[str]) -> Values:
    """Count moves by step, and what is stuck by reason.

    Args:
        refused: the field (`partition`, ...) that each group of refused jobs has in common.
    """
    reasons = Counter(refused)
    reasons["move"] = len(stuck)
    return {"polluxd_open_moves": Counter(move.step.value for move in moves), "polluxd_stuck": reasons}


def of_idle(idle: Sequence[IdleGpus]) -> Values:
    """Count the jobs that wait beside idle GPUs which they may use."""
    waiting = Counter("explained" if one.stated else "unexplained" for one in idle)
    return {"polluxd_jobs_beside_idle_gpus": waiting}
