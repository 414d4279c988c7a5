"""Every metric, with its help text, its labels and their values.

Two kinds: counters and histograms of this process, and gauges of the cluster. Only the leader has gauges of the
cluster, so that a sum over several polluxd counts each job once.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from polluxd.config.value_types import Objective
from polluxd.errors import SlurmError, SlurmRefused, SlurmUnavailable
from polluxd.model import JobState, Step
from polluxd.slurm.protocol import SlurmClient

CYCLE_RESULTS = (
    "decided",
    "polled",
    "standby",
    "lead_lost",
    "slurm_error",
    "database_error",
    "refused",
    "fault",
)
"""How a turn of polluxd's loop may end. `polled`: sound, and no decision was due. `fault`: a mistake in polluxd."""

PHASES = ("observe", "decide", "act")
MOVE_PATHS = ("start", "requeue", "park", "resize")
MOVE_RESULTS = ("completed", "failed", "withdrawn")
# can_shrink is answered from memory most of the time: its duration says nothing about Slurm.
SLURM_CALLS = tuple(n for n in vars(SlurmClient) if not n.startswith("_") and n != "can_shrink")
SLURM_RESULTS = ("ok", "unavailable", "refused", "garbled")
DATABASE_ERRORS = ("unavailable", "rejected", "lead_lost")

_CALL_S = (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_MOVE_S = (0.3, 1, 3, 10, 20, 30, 60, 120, 300, 900)


@dataclass(frozen=True, slots=True)
class ClusterGauge:
    """One gauge of the cluster, as the leader last saw it."""

    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    """Every value of the label."""


CLUSTER_GAUGES: Mapping[str, ClusterGauge] = {
    "polluxd_jobs": ClusterGauge(
        "Pollux jobs that have not ended, by Slurm state.",
        "state",
        tuple(state.value for state in JobState if not state.finished),
    ),
    "polluxd_gpus": ClusterGauge(
        "GPUs of the cluster: held by Pollux jobs, held by other jobs, free, or on nodes that Slurm does not use.",
        "state",
        ("pollux", "other", "free", "closed"),
    ),
    "polluxd_reports": ClusterGauge(
        "Running Pollux jobs by their agent's newest report: fresh, older than three minutes (stale), of no agent "
        "(missing), unusable (rejected), or with a claim that polluxd does not believe (doubted).",
        "state",
        ("fresh", "stale", "missing", "rejected", "doubted"),
    ),
    "polluxd_open_moves": ClusterGauge(
        "Moves under way, by the step that they have reached.",
        "step",
        tuple(step.value for step in Step if not step.terminal),
    ),
    "polluxd_stuck": ClusterGauge(
        "What holds jobs up longer than it should: moves that stay in one step (move), and groups of jobs that Slurm "
        "refuses to start, by what they have in common.",
        "reason",
        ("move", "partition", "account", "qos", "licenses"),
    ),
    "polluxd_barred_sizes": ClusterGauge(
        "Causes for which Slurm, a hook or a script refused a size: it stays barred until the cause has changed."
    ),
    "polluxd_jobs_beside_idle_gpus": ClusterGauge(
        "Waiting Pollux jobs that could have started for five decision intervals on GPUs that nobody holds, by whether "
        "polluxd's reason (a rule, a limit, a move) explains it.",
        "reason",
        ("explained", "unexplained"),
    ),
    "polluxd_paused": ClusterGauge("1 while `polluxctl pause` is in force."),
    "polluxd_fitness": ClusterGauge(
        "Value of the objective in the newest plan.", "objective", get_args(Objective)
    ),
    "polluxd_solver_gap_ratio": ClusterGauge(
        "Relative distance of the newest plan to its proven bound; 0 is optimal."
    ),
    "polluxd_gpu_price": ClusterGauge(
        "Price of a GPU of the dearest type: seconds that it takes off all jobs' completion times per second. 0 while "
        "GPUs are left, absent under the objective fair-share."
    ),
    "polluxd_goodput_examples_per_second": ClusterGauge(
        "Goodput of all running Pollux jobs together, as their agents measure it."
    ),
    "polluxd_mean_speedup": ClusterGauge(
        "Mean predicted speedup of the jobs with GPUs, each against its fair share."
    ),
    "polluxd_last_successful_cycle_timestamp_seconds": ClusterGauge(
        "When the leader last recorded a decision (POSIX time)."
    ),
}


class _ClusterFigures(Collector):
    """The gauges of the cluster; none while another polluxd leads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: dict[str, Mapping[str, float]] = {}

    def show(self, values: Mapping[str, Mapping[str, float]]) -> None:
        """Replace gauges by name; one has a value per label value, or under `""` where it has no label."""
        with self._lock:
            self._shown |= values

    def clear(self) -> None:
        with self._lock:
            self._shown = {}

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            shown = dict(self._shown)
        for name, gauge in CLUSTER_GAUGES.items():
            if name not in shown:
                continue
            family = GaugeMetricFamily(name, gauge.help, labels=[gauge.label] if gauge.label else None)
            for word in gauge.values or ("",):
                if gauge.label or word in shown[name]:
                    family.add_metric([word] if gauge.label else [], shown[name].get(word, 0.0))
            yield family


class Metrics:
    """All metrics of one polluxd, in a registry of their own."""

    def __init__(self, version: str = "") -> None:
        self.registry = CollectorRegistry()
        self.cluster = _ClusterFigures()
        self.registry.register(self.cluster)
        count, measure = partial(Counter, registry=self.registry), partial(Histogram, registry=self.registry)
        self._build = Info("polluxd_build", "Version of polluxd and of its Python.", registry=self.registry)
        self._build.info({"version": version, "python_version": platform.python_version()})
        self.is_leader = Gauge(
            "polluxd_is_leader", "1 while this polluxd leads its cluster, else 0.", registry=self.registry
        )
        self.cycles = count("polluxd_cycles", "Turns of polluxd's loop, by how they ended.", ["result"])
        self.late_decisions = count(
            "polluxd_late_decisions", "Decisions that took longer than cycle.interval_s."
        )
        self.phase_duration = measure(
            "polluxd_cycle_phase_duration_seconds",
            "Duration of each phase of cycles that decided.",
            ["phase"],
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
        )
        self.moves = count("polluxd_moves", "Moves that ended, by path and result.", ["path", "result"])
        self.move_duration = measure(
            "polluxd_move_duration_seconds",
            "Time from the plan to the first training step (path park: to the requeue) of completed moves.",
            ["path"],
            buckets=_MOVE_S,
        )
        self.slurm_calls = measure(
            "polluxd_slurm_call_duration_seconds",
            "Duration of requests to Slurm, by kind and result.",
            ["call", "result"],
            buckets=_CALL_S,
        )
        self.database_errors = count(
            "polluxd_database_errors",
            "Transactions that failed: no answer, a refusal, or written by a polluxd that no longer leads.",
            ["kind"],
        )
        # A series that begins at 0 shows its first increment as a rate.
        for result in CYCLE_RESULTS:
            self.cycles.labels(result)
        for phase in PHASES:
            self.phase_duration.labels(phase)
        for path in MOVE_PATHS:
            self.move_duration.labels(path)
            for result in MOVE_RESULTS:
                self.moves.labels(path, result)
        for call in SLURM_CALLS:
            self.slurm_calls.labels(call, "ok")
        for kind in DATABASE_ERRORS:
            self.database_errors.labels(kind)

    def cycle_over(self, result: str, *, leads: bool) -> None:
        """Count one turn of the loop; `result` is one of `CYCLE_RESULTS`."""
        self.cycles.labels(result).inc()
        self.is_leader.set(leads)
        if not leads:
            self.cluster.clear()

    def decided(self, durations: Mapping[str, float], interval_s: float) -> None:
        """Observe the phases of a cycle that decided [s]; `interval_s` lies between two decisions."""
        for phase in PHASES:
            self.phase_duration.labels(phase).observe(durations[f"{phase}_s"])
        self.late_decisions.inc(sum(durations[f"{phase}_s"] for phase in PHASES) > interval_s)

    def move_over(self, path: str, result: str, seconds: float) -> None:
        """Count a move that ended; `seconds` since it was planned."""
        self.moves.labels(path, result).inc()
        if result == "completed":
            self.move_duration.labels(path).observe(seconds)

    def database_failed(self, kind: str) -> None:
        self.database_errors.labels(kind).inc()


class _TimedSlurm:
    """Passes each request on to `client`, and measures how long it takes and how it ends."""

    def __init__(self, client: SlurmClient, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._client, self._metrics, self._clock = client, metrics, clock

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        if name not in SLURM_CALLS:
            return call

        def timed(*arguments: Any, **options: Any) -> Any:
            began, result = self._clock(), "ok"
            try:
                return call(*arguments, **options)
            except SlurmError as error:
                kinds = {SlurmUnavailable: "unavailable", SlurmRefused: "refused"}
                result = next((kind for of, kind in kinds.items() if isinstance(error, of)), "garbled")
                raise
            finally:
                self._metrics.slurm_calls.labels(name, result).observe(self._clock() - began)

        return timed


def timed_slurm(
    client: SlurmClient, metrics: Metrics, clock: Callable[[], float] = time.perf_counter
) -> SlurmClient:
    """Return a client that measures the requests it passes on."""
    return cast(SlurmClient, _TimedSlurm(client, metrics, clock))
