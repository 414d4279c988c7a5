"""`polluxctl simulate`: replay a trace without Slurm and database."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from polluxd.errors import ConfigError
from polluxd.setting_info import checked, policy_info
from polluxd.sim import plots, recorded
from polluxd.sim.cluster import LENGTHS, Cloud, NodeGroup, Scenario
from polluxd.sim.comparison import Heard, applications_of, compare
from polluxd.sim.generator import generate
from polluxd.sim.move_costs import MoveCosts
from polluxd.sim.policies import POLICIES
from polluxd.sim.policy_knowledge import Knowledge
from polluxd.sim.workload import Submission, read_workload

from .output import Column, Row, duration, jsonable, number, table
from .setting_words import parse_power

COLUMNS = (
    Column("policy", "POLICY"),
    Column("avg_jct_s", "MEAN JCT", duration, right=True),
    Column("p50_jct_s", "P50", duration, right=True, rank=2),
    Column("p99_jct_s", "P99", duration, right=True, rank=1),
    Column("makespan_s", "MAKESPAN", duration, right=True, rank=1),
    Column("avg_restarts", "RESTARTS", number(3), right=True, rank=4),
    Column("gpu_hours", "GPU-HOURS", number(4), right=True, rank=5),
    Column("avg_efficiency", "EFFICIENCY", number(3), right=True, rank=6),
    Column("fairness_mean", "FAIRNESS", number(3), right=True, rank=3),
    Column("fairness_worst", "WORST", number(3), right=True, rank=7),
    Column("cost", "COST", number(4), right=True, rank=1),
    Column("decision_median", "DECISION [ms]", number(3), right=True, rank=8),
)


def simulate(
    workload: Annotated[
        Path | None,
        typer.Argument(metavar="[WORKLOAD.csv]", help="trace in the OSDI'21, Philly or Helios format"),
    ] = None,
    from_sacct: Annotated[
        Path | None,
        typer.Option(
            "--from-sacct", help="trace from `sacct --parsable2` with JobID, Submit, Elapsed, AllocTRES"
        ),
    ] = None,
    generate_jobs: Annotated[
        int | None,
        typer.Option("--generate", metavar="JOBS", min=1, help="generate a trace of JOBS jobs"),
    ] = None,
    hours: Annotated[
        float, typer.Option("--hours", min=0.1, help="hours over which the generated jobs arrive")
    ] = 8.0,
    sweep: Annotated[
        int, typer.Option("--sweep", min=1, help="trials of each generated hyper-parameter search")
    ] = 1,
    length: Annotated[
        float, typer.Option("--length", min=0.01, help="factor on the length of each generated training")
    ] = 1.0,
    most_jobs: Annotated[
        int | None, typer.Option("--most-jobs", min=1, help="read at most so many jobs of a recorded trace")
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option("--profiles", help="folder of measured applications [default: the shipped ones]"),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", help=f"policy to simulate, repeatable: {', '.join(POLICIES)} [default: pollux]"
        ),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=100_000, help="nodes of the cluster")] = 16,
    gpus_per_node: Annotated[
        int, typer.Option("--gpus-per-node", min=1, max=64, help="GPUs of each node")
    ] = 4,
    interval: Annotated[float, typer.Option("--interval", min=1, help="seconds between decisions")] = 60.0,
    restart_seconds: Annotated[
        float, typer.Option("--restart-seconds", min=0, help="seconds that a move costs a job")
    ] = 30.0,
    restart_range: Annotated[
        str | None,
        typer.Option(
            "--restart-range",
            metavar="LOW,HIGH",
            help="draw --restart-seconds per application from this range",
        ),
    ] = None,
    interference: Annotated[
        float,
        typer.Option("--interference", min=0, max=0.99, help="slowdown of multi-node jobs that share a node"),
    ] = 0.0,
    move_costs: Annotated[
        Path | None,
        typer.Option(
            "--move-costs",
            metavar="FILE",
            help="TOML or JSON file with the seconds of a move by path (resize, requeue, start): jobs "
            "then take polluxd's paths, and --restart-seconds does not count",
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective",
            help=f"objective of policy pollux: {policy_info('objective').expected} [default: polluxd's]",
        ),
    ] = None,
    kappa: Annotated[
        float | None,
        typer.Option(
            "--kappa",
            help="objective completion-time: weight of the last job to end [default: polluxd's]",
        ),
    ] = None,
    power: Annotated[
        str,
        typer.Option(
            "--power",
            metavar="P",
            help="exponent p of the fitness, for objective fair-share and policy pollux-paper",
        ),
    ] = "-1",
    priors: Annotated[
        bool, typer.Option("--priors/--no-priors", help="policy pollux knows the fits of earlier runs")
    ] = True,
    start_gpus: Annotated[
        int | None,
        typer.Option(
            "--start-gpus", help="most GPUs that a job starts with under policy pollux [default: polluxd's]"
        ),
    ] = None,
    remaining_work: Annotated[
        bool,
        typer.Option(
            "--remaining-work/--no-remaining-work", help="policy pollux knows the declared training lengths"
        ),
    ] = True,
    lengths: Annotated[
        str,
        typer.Option(
            "--lengths", help=f"how users declare the lengths of their trainings: {', '.join(LENGTHS)}"
        ),
    ] = "true",
    noise: Annotated[
        float, typer.Option("--noise", min=0, max=1, help="relative error of what agents measure")
    ] = 0.0,
    noise_scale_error: Annotated[
        float,
        typer.Option(
            "--noise-scale-error", min=0, max=1, help="relative error of measured noise scales alone"
        ),
    ] = 0.0,
    users: Annotated[int, typer.Option("--users", min=1, help="users who submit the jobs, in turn")] = 1,
    failures_per_day: Annotated[
        float, typer.Option("--failures-per-day", min=0, help="node failures per day in the whole cluster")
    ] = 0.0,
    repair_seconds: Annotated[
        float, typer.Option("--repair-seconds", min=0, help="seconds until a failed node is back")
    ] = 1800.0,
    gpu_types: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu-types",
            metavar="NAME:NODES:GPUS[:SPEED]",
            help="nodes of one GPU type, repeatable; replaces --nodes and --gpus-per-node. Step times are those of "
            "PROFILES/APPLICATION/NAME if it exists (the shipped applications know t4, v100 and a100), divided "
            "by SPEED",
        ),
    ] = None,
    nodes_per_rack: Annotated[
        int, typer.Option("--nodes-per-rack", min=0, help="nodes on one switch; 0: one switch for all nodes")
    ] = 0,
    rack_slowdown: Annotated[
        float,
        typer.Option(
            "--rack-slowdown", min=0, max=100, help="share by which synchronisation over racks takes longer"
        ),
    ] = 0.0,
    autoscale: Annotated[
        str | None,
        typer.Option(
            "--autoscale",
            metavar="LEAST,MOST",
            help="policy pollux rents nodes while their use justifies it; other policies rent the most. Adds node "
            "hours and cost",
        ),
    ] = None,
    boot_seconds: Annotated[
        float, typer.Option("--boot-seconds", min=0, help="seconds from renting a node to its use")
    ] = 120.0,
    node_price: Annotated[
        float, typer.Option("--node-price", min=0, help="price of one node for an hour")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="seed of all random numbers")] = 0,
    in_parallel: Annotated[
        int,
        typer.Option(
            "--jobs-in-parallel", min=1, help="policies simulated at the same time; the results stay the same"
        ),
    ] = 1,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="OUT.json", help="write all results, unrounded")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="OUT.png", help="write one page of plots")
    ] = None,
) -> None:
    """Replay a trace of jobs under one policy or several."""
    names = list(dict.fromkeys(policy or ["pollux"]))
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise ConfigError(f"--policy {unknown[0]}: no such policy; there are {', '.join(POLICIES)}")
    if lengths not in LENGTHS:
        raise ConfigError(f"--lengths {lengths}: expected one of {', '.join(LENGTHS)}")
    known = Knowledge()
    knowledge = replace(
        known,
        objective=known.objective if objective is None else checked("objective", objective),
        kappa=known.kappa if kappa is None else checked("kappa", kappa),
        start_gpus=known.start_gpus if start_gpus is None else checked("start_gpus", start_gpus),
        remembers=priors,
        remaining_work=remaining_work,
        remaining_work_power=known.remaining_work_power if remaining_work else 0.0,
    )
    cloud = _cloud(autoscale, boot_seconds, node_price)
    scenario = Scenario(
        nodes=nodes if cloud is None else cloud.most,
        gpus_per_node=gpus_per_node,
        interval=interval,
        floor=min(Scenario().floor, interval),
        poll=min(Scenario().poll, interval),
        restart_seconds=restart_seconds,
        restart_range=_range(restart_range),
        interference=interference,
        moves=None if move_costs is None else MoveCosts.read(move_costs),
        jitter=noise,
        noise_jitter=noise_scale_error,
        lengths=lengths,
        users=users,
        failures_per_day=failures_per_day,
        power=parse_power(power),
        pollux=knowledge,
        seed=seed,
        repair_seconds=repair_seconds,
        groups=tuple(NodeGroup.parse(text) for text in gpu_types or ()),
        nodes_per_rack=nodes_per_rack,
        rack_slowdown=rack_slowdown,
        cloud=cloud,
    )
    for path in (as_json, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: its folder does not exist; make it first")
    source = _JobSource(workload, from_sacct, generate_jobs, hours, sweep, length, most_jobs)
    jobs, title = source.read(profiles, scenario)
    with _watched(names, len(jobs)) as heard:
        results = compare(jobs, profiles, names, scenario, in_parallel=in_parallel, heard=heard)
    document = {"workload": title, "scenario": asdict(scenario), "policies": results}
    if as_json is not None:
        as_json.write_text(json.dumps(jsonable(document), indent=1, allow_nan=False) + "\n")
    if plot is not None:
        plots.page(results, f"{title}: {len(jobs)} jobs on {_hardware(scenario)}", plot)
    console = Console(highlight=False)
    if from_sacct is not None or (workload is not None and recorded.recognise(workload)):
        # The trace does not say what was trained: the reader of the table must know what was assumed.
        assumed = ", ".join(f"{count} {name}" for name, count in recorded.kinds(jobs))
        console.print(f"{len(jobs)} jobs, taken to train as the nearest in duration: {assumed}", markup=False)
    shown = [column for column in COLUMNS if column.key != "cost" or cloud is not None]
    console.print(table([_row(name, results[name]) for name in names], shown, console.width))


@dataclass(frozen=True, slots=True)
class _JobSource:
    """Where the jobs come from: one of three."""

    workload: Path | None
    sacct: Path | None
    jobs: int | None
    hours: float
    sweep: int
    length: float
    most_jobs: int | None

    def read(self, profiles: Path | None, scenario: Scenario) -> tuple[tuple[Submission, ...], str]:
        """The jobs, and what to call them."""
        if sum(given is not None for given in (self.workload, self.sacct, self.jobs)) != 1:
            raise ConfigError(
                "what to simulate? give WORKLOAD.csv, --from-sacct FILE or --generate JOBS, one of them"
            )
        applications = applications_of(profiles)
        if self.jobs is not None:
            made = generate(
                applications,
                self.jobs,
                self.hours,
                cluster_gpus=scenario.gpus,
                seed=scenario.seed,
                sweep=self.sweep,
                length=self.length,
            )
            return made, f"{self.jobs} jobs generated over {self.hours:g} h"
        path = self.sacct or self.workload
        assert path is not None
        kind = recorded.SACCT if self.sacct is not None else recorded.recognise(path)
        if kind is None:
            return read_workload(path, applications, cluster_gpus=scenario.gpus)[: self.most_jobs], path.name
        found = recorded.read_recorded(
            path,
            kind,
            applications,
            cluster_gpus=scenario.gpus,
            gpus_per_node=scenario.gpus_per_node,
            most_jobs=self.most_jobs,
        )
        return found, path.name


def _row(name: str, result: dict[str, Any]) -> Row:
    return {
        "policy": name,
        **result,
        "fairness_mean": result["finish_time_fairness"]["mean"],
        "fairness_worst": result["finish_time_fairness"]["worst"],
        "decision_median": result["decision_ms"]["median"],
    }


def _range(text: str | None) -> tuple[float, float] | None:
    """LOW,HIGH in seconds."""
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        low = high = float("nan")
    if not 0 < low <= high < 86400:
        raise ConfigError(f"--restart-range {text}: expected LOW,HIGH in seconds, such as 15,250")
    return low, high


def _cloud(text: str | None, boot_seconds: float, price: float) -> Cloud | None:
    """LEAST,MOST nodes."""
    if text is None:
        return None
    try:
        least, most = (int(part) for part in text.split(","))
    except ValueError:
        least = most = 0
    if not 1 <= least <= most:
        raise ConfigError(f"--autoscale {text}: expected LEAST,MOST nodes from 1, such as 4,16")
    return Cloud(least, most, boot_seconds=boot_seconds, price=price)


def _hardware(scenario: Scenario) -> str:
    """In a few words."""
    if not scenario.groups:
        return f"{scenario.nodes} x {scenario.gpus_per_node} GPUs"
    return ", ".join(f"{g.nodes} x {g.gpus_per_node} {g.gpu_type}" for g in scenario.groups)


@contextmanager
def _watched(names: Sequence[str], jobs: int) -> Iterator[Heard]:
    """A bar per policy on standard error; silent where that is no terminal."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        bars = {name: progress.add_task(name, total=jobs) for name in names}
        yield lambda name, ended, _of: progress.update(bars[name], completed=ended)
