"""Print the dashboard of polluxd's metrics as Grafana's JSON: `python -m contrib.grafana >polluxd-prometheus.json`.

The packages have the file. A panel is a row of `STATS` or of `SERIES`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Panel(NamedTuple):
    """One picture: what it shows, in which unit, and a sentence on it."""

    title: str
    unit: str
    queries: Mapping[str, str]
    """Expressions by the legend of their lines."""
    told: str = ""
    stacked: bool = False


def lasted(by: str, share: float, over: str) -> str:
    """Return the query of a quantile of a duration."""
    return f"histogram_quantile({share:g}, sum by (le, {by}) ({over}))"


MOVES = "increase(polluxd_move_duration_seconds_bucket[1h])"
PHASE = "polluxd_cycle_phase_duration_seconds"
STATS = (
    Panel("Leaders", "short", {"": "sum(polluxd_is_leader)"}, "polluxd processes that lead; one is right."),
    Panel(
        "Since the last decision", "s", {"": "time() - max(polluxd_last_successful_cycle_timestamp_seconds)"}
    ),
    Panel(
        *("Stuck", "short", {"": "sum(polluxd_stuck)"}),
        "Moves and groups of jobs that are held up; `polluxctl status` says why.",
    ),
    Panel(
        "Mean speedup",
        "short",
        {"": "max(polluxd_mean_speedup)"},
        "Predicted, each job against its fair share.",
    ),
    Panel(
        *("Price of a GPU", "short", {"": "max(polluxd_gpu_price)"}),
        "Seconds that a GPU takes off all jobs' completion times per second; 0 while GPUs are left.",
    ),
    Panel(
        *("Gap to the bound", "percentunit", {"": "max(polluxd_solver_gap_ratio)"}),
        "How far the newest plan may be from the best one.",
    ),
)
SERIES = (
    Panel("GPUs", "short", {"{{state}}": "sum by (state) (polluxd_gpus)"}, stacked=True),
    Panel("Jobs", "short", {"{{state}}": "sum by (state) (polluxd_jobs)"}, stacked=True),
    Panel(
        *("Goodput", "short", {"goodput": "sum(polluxd_goodput_examples_per_second)"}),
        "Of all running Pollux jobs together [examples/s].",
    ),
    Panel(
        *("Fitness", "short", {"{{objective}}": "max by (objective) (polluxd_fitness)"}),
        "Value of the objective in the newest plan.",
    ),
    Panel(
        *("Moves per hour", "short"),
        {"{{path}}, {{result}}": "sum by (path, result) (increase(polluxd_moves_total[1h]))"},
    ),
    Panel(
        *("Duration of moves", "s"),
        {
            "{{path}} median": lasted("path", 0.5, MOVES),
            "{{path}} 90 %": lasted("path", 0.9, MOVES),
        },
        "Median and 90th percentile, from the plan to the first training step.",
    ),
    Panel(
        *("Cycle by phase", "s"),
        {
            "{{phase}}": f"sum by (phase) (rate({PHASE}_sum[10m])) / sum by (phase) (rate({PHASE}_count[10m]))",
        },
        "Mean duration.",
    ),
    Panel(
        *("Requests to Slurm", "s"),
        {"{{call}}": lasted("call", 0.9, "rate(polluxd_slurm_call_duration_seconds_bucket[10m])")},
        "90th percentile of the duration.",
    ),
    Panel(
        *("Turns of the loop by result", "short"),
        {"{{result}}": "sum by (result) (rate(polluxd_cycles_total[10m])) * 60"},
        "Per minute.",
    ),
    Panel(
        *("Database errors per minute", "short"),
        {"{{kind}}": "sum by (kind) (rate(polluxd_database_errors_total[10m])) * 60"},
    ),
    Panel(
        *("Reports", "short", {"{{state}}": "sum by (state) (polluxd_reports)"}),
        "Running jobs by their agent's newest report.",
        stacked=True,
    ),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard: six numbers above two columns of lines."""
    stats = (_panel(p, "stat", 4 * i, 0, 4, 4) for i, p in enumerate(STATS))
    series = (_panel(p, "timeseries", 12 * (i % 2), 4 + 8 * (i // 2), 12, 8) for i, p in enumerate(SERIES))
    choice = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        **{
            "title": "polluxd",
            "uid": "polluxd",
            "tags": ["slurm", "pollux"],
            "schemaVersion": 39,
            "version": 1,
        },
        **{
            "editable": True,
            "refresh": "30s",
            "time": {"from": "now-3h", "to": "now"},
            "timezone": "browser",
        },
        "templating": {"list": [choice]},
        "panels": [panel | {"id": number} for number, panel in enumerate([*stats, *series], 1)],
    }


def _panel(panel: Panel, kind: str, x: int, y: int, width: int, height: int) -> dict[str, Any]:
    now = kind == "stat"
    custom = {"custom": {"stacking": {"mode": "normal"}, "fillOpacity": 30}} if panel.stacked else {}
    asked = enumerate(panel.queries.items())
    return {
        **{"type": kind, "title": panel.title, "description": panel.told, "datasource": SOURCE},
        "gridPos": {"x": x, "y": y, "w": width, "h": height},
        "targets": [
            {
                "refId": "ABC"[i],
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend,
                "instant": now,
                "range": not now,
            }
            for i, (legend, query) in asked
        ],
        "fieldConfig": {"defaults": {"unit": panel.unit, **custom}, "overrides": []},
        "options": {"colorMode": "value", "graphMode": "none"} if now else {},
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2))
