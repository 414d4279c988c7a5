"""Two decisions of mode observe, and what accounting has of the same jobs."""

from __future__ import annotations

from dataclasses import replace

from polluxd.model import JobSpec, Placement, Snapshot
from tests.build import job, nodes, report, running

from .site_text import T0

HOSTILE = "<script>alert(1)</script>\x1b[2J"
MEASURED = report(explored=8, explored_nodes=2)
LOG = [
    {"id": 1, "gpus": 1, "eligible": 0, "start": 0, "end": 30, "places": ("n000",), "name": HOSTILE},
    {"id": 2, "gpus": 4, "eligible": 5, "start": 20, "end": 30, "places": ("n001",)},
]


def snapshots() -> list[tuple[float, Snapshot]]:
    """Job 1 holds one GPU all the time; job 2 waits for ten minutes, and holds four for another ten."""
    first = running(1, ["n000"], 1, JobSpec(max_gpus=8), report=MEASURED)
    waits = job(2, JobSpec(max_gpus=4), report=MEASURED)
    unknown = job(99, JobSpec(max_gpus=1), report=MEASURED)
    begun = replace(waits, placement=Placement(("n001",), 4), started=True)
    return [
        (600.0, Snapshot("dev", T0 + 600.0, nodes(2), (first, waits, unknown))),
        (600.0, Snapshot("dev", T0 + 1200.0, nodes(2), (first, begun))),
    ]
