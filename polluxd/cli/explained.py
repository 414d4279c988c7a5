"""All that `polluxctl explain JOB` tells, as one document."""

from __future__ import annotations

import time
from typing import Any

from polluxd.config.setting_info import policy_document
from polluxd.config.settings import PolicySettings
from polluxd.errors import PolluxError, StoreRejected
from polluxd.model import Allocation
from polluxd.model.snapshot_json import decode_snapshot
from polluxd.policy.what_if import one_node_more
from polluxd.store import Store

from . import job_story
from .table_rows import job_row, move_rows

MOST_JOBS = 500
"""Jobs of a cluster in which an answer that many may ask for decides again with one more node: a second of CPU."""


def unknown(job: int) -> PolluxError:
    return PolluxError(
        f"job {job} is not known to polluxd: it has no #POLLUX line, or polluxd has not looked since "
        "it was submitted (`squeue` shows all jobs)"
    )


def explained(
    store: Store, job: int, defaults: PolicySettings, *, to_owner: bool = False, most_jobs: int | None = None
) -> dict[str, Any]:
    """Return what `explain` prints. Raises PolluxError for an unknown job.

    Args:
        to_owner: leave out the settings, and the speedups of other users' jobs.
        most_jobs: decide again with one more node only in a cluster of at most so many jobs.
    """
    found = store.explain(job)
    if found is None:
        raise unknown(job)
    moves = move_rows(store, job)
    row = job_row(found.job, sum(m["total_s"] or 0.0 for m in moves), time.time())
    settings = policy_document(store.settings(defaults))
    snapshot = store.cycle_snapshot(found.cycle.id) if found.cycle else None
    again = most_jobs is None or len((snapshot or {}).get("jobs", ())) <= most_jobs
    more = _with_node_more(snapshot, job) if again and found.job.ended_at is None else None
    decision = job_story.decision(found)
    if decision is not None and more is not None:
        ends = more.explanation.seconds_left if more.explanation is not None else None
        decision["one_node_more"] = {"gpus": more.placement.gpus, "seconds_left": ends}
    others = store.allocations(found.cycle.id) if found.cycle and not to_owner else []
    return {
        "job": row,
        "decision": decision,
        "sizes": job_story.sizes(found, *job_story.node_size(snapshot, found.report)),
        "sizes_of": job_story.fit_type(snapshot, found.report),
        "moves": moves,
        "settings": {"paused": settings["paused"]} if to_owner else settings,
        "story": job_story.story(row, found, settings, others, more),
    }


def _with_node_more(snapshot: Any, job: int) -> Allocation | None:
    """Decide again with one more node; None where no snapshot is stored."""
    try:
        return one_node_more(decode_snapshot(snapshot), job)
    except StoreRejected:
        # Kept by another version of polluxd, or not kept at all.
        return None
