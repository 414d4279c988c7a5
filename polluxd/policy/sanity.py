"""Ignore reported values that no job can have.

One bad report must not distort the plan of all jobs. The policy ignores a fit or a noise scale that no training can
have. It then treats the job as not measured yet, and the job's reason says so.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pollux.goodput import NoiseScale, ThroughputParams
from polluxd.model import Report, Snapshot, SnapshotJob

SLOWEST = 1e6
"""Seconds per pass, per example or per GPU beyond which a fit is not believed: eleven days."""
STEEPEST = 10.0
"""Largest gamma of the model; the smallest is 1."""
_SLACK = 1e-6


def believable(snapshot: Snapshot) -> tuple[Snapshot, dict[int, str]]:
    """Return the snapshot without values that cannot be true, and notes.

    The notes say, by job id, which values were ignored.
    """
    notes: dict[int, str] = {}
    jobs = []
    for job in snapshot.jobs:
        kept, doubts = _job(job)
        jobs.append(kept)
        if doubts:
            notes[job.job_id] = f"put aside as unbelievable: {', '.join(doubts)}"
    return (replace(snapshot, jobs=tuple(jobs)), notes) if notes else (snapshot, notes)


def _job(job: SnapshotJob) -> tuple[SnapshotJob, list[str]]:
    doubts: list[str] = []
    report = None if job.report is None else _report(job.report, doubts)
    sound = math.isfinite(job.weight + job.age + job.lost_seconds + job.move_cost)
    if sound and all(value is None or math.isfinite(value) for value in (job.waiting, job.time_limit)):
        return (replace(job, report=report) if doubts else job), doubts
    # An unknown age must neither forbid a move nor make it free.
    fallback = {"weight": 1.0, "age": 3600.0, "lost_seconds": 0.0, "move_cost": 30.0}
    values = {name: getattr(job, name) for name in (*fallback, "waiting", "time_limit")}
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            doubts.append(f"{name}={value}")
            values[name] = fallback.get(name)
    return replace(job, report=report, **values), doubts


def _report(report: Report, doubts: list[str]) -> Report:
    """Return the report without impossible values; name them in `doubts`."""
    if report.params is not None and (why := _odd_params(report.params)):
        doubts.append(f"its fit ({why}), so its prior is used")
        # The largest measured size belonged to the ignored fit.
        report = replace(report, params=None, explored_gpus=0, explored_nodes=0)
    for kind, fit in report.params_by_type.items():
        if why := _odd_params(fit):
            doubts.append(f"its fit on {kind} ({why})")
            others = {k: other for k, other in report.params_by_type.items() if k != kind}
            report = replace(report, params_by_type=others)
    if report.noise is not None and not math.isfinite(report.noise.sqr + report.noise.var):
        doubts.append(f"its noise scale ({_odd_noise(report.noise)})")
        report = replace(report, noise=None)
    if report.target is not None and not math.isfinite(report.target - report.progress):
        doubts.append(f"its remaining work (progress={report.progress}, target={report.target})")
        report = replace(report, target=None)
    return report


def _odd_params(params: ThroughputParams) -> str:
    """What is wrong with the fit, in words; nothing where it may be true."""
    known = [value for value in params if value is not None]
    bounded = min(known) >= 0.0 and max(known) <= SLOWEST
    # NaN compares as false, but min and max may pass over one: the sum does not.
    if bounded and _steep_enough(params.gamma) and math.isfinite(sum(known)):
        return ""
    odd = [
        f"{name}={value:g}"
        for name, value in params._asdict().items()
        if value is not None and not (_steep_enough(value) if name == "gamma" else 0.0 <= value <= SLOWEST)
    ]
    return " ".join(odd)


def _steep_enough(gamma: float) -> bool:
    return 1.0 - _SLACK <= gamma <= STEEPEST + _SLACK


def _odd_noise(noise: NoiseScale) -> str:
    return f"sqr={noise.sqr:g} var={noise.var:g}"
