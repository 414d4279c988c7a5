"""A store in memory, and polluxctl run in this process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from typing import Any

import pytest

from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams
from polluxd import model
from polluxd.cli import access, ctl
from polluxd.cli.slurm_view import Beside, SlurmView
from polluxd.config.settings import PolicySettings
from polluxd.model import Allocation, JobSpec, Move, Placement, Report, Step
from polluxd.store import CycleView, HistoryPoint, JobExplanation, JobView, Leader, SettingChange
from tests.build import config

NOW = 1_700_000_000.0

REPORT = Report(
    attempt=1,
    at=NOW - 5,
    limits=BatchLimits(64, 1024, 8, 256),
    params=ThroughputParams(0.05, 0.001, 0.02, 0.0, 0.05, 0.0, 1.5),
    noise=NoiseScale(1.0, 4.0),
    explored_gpus=4,
    explored_nodes=1,
    gpus=4,
    nodes=1,
    batch_size=256,
    goodput=1234.5678,
    throughput=1500.0,
    progress=50.0,
    target=200.0,
    lr_factor=1.9,
)

VIEW = JobView(
    job_id=7,
    name="resnet",
    user="ada",
    account="vision",
    partition="main",
    state="RUNNING",
    slurm_reason="None",
    attempt=1,
    spec=JobSpec(min_gpus=1, max_gpus=8),
    nodes=("n1",),
    gpus=4,
    submitted_at=NOW - 100,
    started_at=NOW - 40,
    ended_at=None,
    reported_at=NOW - 5,
    batch_size=256,
    goodput=1234.5678,
    throughput=1500.0,
    progress=50.0,
    target=200.0,
    epoch=2.5,
    checkpointed=True,
    speedup=1.25,
    decision_reason="grows from 2 to 4 GPUs: the marginal GPU helps it most",
    cycle_id=42,
    moves=1,
    move_step="training",
    move_reason="grows",
    move_detail="",
)

MOVE = Move(
    id=3,
    job_id=7,
    attempt=0,
    path="requeue",
    source=Placement(("n1",), 2),
    target=Placement(("n1",), 4),
    reason="grows from 2 to 4 GPUs",
    step=Step.TRAINING,
    times={Step.PLANNED: NOW - 50.0, Step.DRAINING: NOW - 49.9, Step.TRAINING: NOW - 40.0},
)


@dataclass
class MemoryStore:
    """What the commands ask of the real store, from lists."""

    cluster: str = "dev"
    node_gpus: int = 8
    node_types: tuple[str, ...] = ("",)
    views: list[JobView] = field(default_factory=lambda: [VIEW])
    known_moves: list[Move] = field(default_factory=lambda: [MOVE])
    report: Report | None = REPORT
    rejected: str = ""
    current: PolicySettings = field(default_factory=PolicySettings)
    changes: list[SettingChange] = field(default_factory=list)
    newest: tuple[int, Any] | None = None
    taker: Allocation | None = None
    explanation: model.Explanation | None = None
    leased: bool = True
    decided_at: float = NOW - 7
    points: list[HistoryPoint] = field(default_factory=list)
    shadowed: list[CycleView] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    beside: Beside | None = None
    """What Slurm shows."""

    foretold: list[dict[str, Any]] = field(default_factory=list)

    def forecasts(self, most: int = 1) -> list[dict[str, Any]]:
        return self.foretold[:most]

    def jobs_view(
        self, *, ended: bool = True, uid: int | None = None, since: float = 0.0, most: int = 0
    ) -> list[JobView]:
        return [v for v in self.views if (ended or v.ended_at is None) and uid in (None, v.uid)]

    def explain(self, job_id: int) -> JobExplanation | None:
        view = next((v for v in self.views if v.job_id == job_id), None)
        if view is None:
            return None
        placed = Allocation(
            *(job_id, Placement(("n1",), 4), 1300.0, 1.25, 256, True, view.decision_reason or ""),
            explanation=self.explanation,
        )
        return JobExplanation(view, self.report, placed, self.latest_cycle(), self.rejected)

    def cycle_snapshot(self, cycle_id: int) -> dict[str, Any]:
        types = self.node_types
        return {
            "nodes": [
                {"name": f"n{i}", "gpus": self.node_gpus, "gpu_type": types[i % len(types)]} for i in range(4)
            ]
        }

    def newest_snapshot(self) -> tuple[int, Any] | None:
        return self.newest

    def cluster_over_time(self, since: float, every_s: float) -> list[dict[str, Any]]:
        return [sample for sample in self.samples if sample["at"] >= since]

    def allocations(self, cycle_id: int, *, made_in_it: bool = False) -> list[Allocation]:
        return [] if self.taker is None else [self.taker]

    def moves(self, job_id: int | None = None) -> list[Move]:
        return [m for m in self.known_moves if job_id in (None, m.job_id)]

    def move_costs(self, job_id: int | None = None, *, ended: bool = True) -> list[dict[str, Any]]:
        return [
            {
                "id": m.id,
                "job_id": m.job_id,
                "planned_at": m.times[Step.PLANNED],
                "total_s": 9.0,
                "drained_s": 0.9,
                "steps": {"stop": 1.0, "start": 8.0},
            }
            for m in self.moves(job_id)
            if m.step is Step.TRAINING
        ]

    def reported(self) -> list[dict[str, Any]]:
        return [{"user_name": "ada", "uid": 1000, "reports": 300_000, "bytes": 2**27, "share": 1.2}]

    def report_history(self, job_id: int | None = None, *, since: float = 0.0) -> list[HistoryPoint]:
        return [p for p in self.points if p.job_id == job_id and p.at >= since]

    def cycles_between(self, since: float, until: float, *, kept: bool) -> list[CycleView]:
        return [cycle for cycle in self.shadowed if since <= cycle.started_at <= until]

    def open_moves(self) -> list[Move]:
        return [m for m in self.known_moves if not m.step.terminal]

    def settings(self, defaults: PolicySettings | None = None) -> PolicySettings:
        return self.current

    def set_settings(self, values: Mapping[str, Any], who: str) -> None:
        for name, value in values.items():
            before = getattr(self.current, name)
            self.current = replace(self.current, **{name: -math.inf if value == "-inf" else value})
            self.changes.insert(0, SettingChange(NOW, who, name, before, value))

    def setting_audit(self) -> list[SettingChange]:
        return self.changes

    def leader(self) -> Leader | None:
        return Leader(5, "host:123", NOW - 500, self.leased)

    def latest_cycle(self) -> CycleView | None:
        return CycleView(
            42, 5, "enforce", self.decided_at, "", 0.81, 0.82, 0.0122, "counts", {"decide_s": 0.01}
        )


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    made = MemoryStore()
    monkeypatch.setattr(access, "open_store", lambda _config: (made, PolicySettings()))
    monkeypatch.setattr(access, "may_read_database", lambda _config: True)
    monkeypatch.setattr(access, "configuration", lambda _config: config())
    monkeypatch.setattr(SlurmView, "read", lambda _self: made.beside)
    monkeypatch.setattr(SlurmView, "ending", lambda _self, job: [f"Its output: /home/ada/{job}.out."])
    return made


@dataclass(frozen=True)
class Said:
    status: int
    out: str
    err: str


@pytest.fixture
def polluxctl(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """`polluxctl("jobs", "--json")` runs the command as the entry point does."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> Said:
        monkeypatch.setattr("sys.argv", ["polluxctl", *words])
        with pytest.raises(SystemExit) as end:
            ctl.main()
        said = capfd.readouterr()
        return Said(int(end.value.code or 0), said.out, said.err)

    return run


HOSTILE = '</title></svg><script>alert(1)</script><img src=x onerror="alert(2)">\x1b[2J\x00\u202e\ud800"\'{{ 7 * 7 }}'


class Elements(HTMLParser):
    """Names of the elements, and attributes that would run or load things."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.active: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.active += [
            name for name, _ in attrs if name.startswith("on") or name in ("src", "href", "srcdoc")
        ]
