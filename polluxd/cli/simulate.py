"""`polluxctl simulate`: replay a trace without Slurm and database."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from polluxd.config.setting_info import policy_info
from polluxd.errors import ConfigError
from polluxd.sim import plots
from polluxd.sim.applications import Application
from polluxd.sim.cluster import Scenario
from polluxd.sim.cluster_logs import Log, read_log, recognise
from polluxd.sim.comparison import OnProgress, applications_of, compare
from polluxd.sim.generator import generate, stiffened
from polluxd.sim.policies import POLICIES, policy_named
from polluxd.sim.recorded import fitting, replayed
from polluxd.sim.scenario_file import read_scenario
from polluxd.sim.workload import Submission, read_workload

from .output import Column, Row, duration, jsonable, number, of_few_jobs, require_writable, table, write_page

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
    Column("idle_s", "IDLE", duration, right=True, rank=9),
    Column("decision_median", "DECISION [ms]", number(3), right=True, rank=8),
)


def simulate(
    workload: Annotated[
        Path | None,
        typer.Argument(
            metavar="[WORKLOAD]",
            help="trace in the OSDI'21 format, or a log: from `sacct --parsable2`, or of Philly, Helios or Acme",
        ),
    ] = None,
    scenario_file: Annotated[
        Path | None,
        typer.Option(
            "--scenario",
            metavar="FILE.toml",
            help="cluster, moves, failures, objective and more; see the simulator's page",
        ),
    ] = None,
    generate_jobs: Annotated[
        int | None,
        typer.Option("--generate", metavar="JOBS", min=1, help="generate a trace of JOBS jobs"),
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option("--profiles", help="folder of measured applications [default: the shipped ones]"),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help=f"policy to simulate, repeatable: {', '.join(POLICIES)}, all of them (all), or your own "
            "(MODULE:CLASS) [default: pollux]",
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", help="nodes of the cluster [default: the scenario's, or 16]")
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", help="GPUs of a node [default: the scenario's, or 4]")
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective",
            help=f"objective of policy pollux: {policy_info('objective').expected} "
            "[default: the scenario's, or polluxd's]",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="seed of all random numbers [default: the scenario's, or 0]")
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="OUT.json", help="write all results, unrounded")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="OUT.png", help="write one page of plots")
    ] = None,
) -> None:
    """Replay a trace of jobs under one policy or several."""
    names = list(dict.fromkeys(policy or ["pollux"]))
    names = list(POLICIES) if "all" in names else names
    for name in names:
        policy_named(name)
    options = {
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "seed": seed,
        "policy": {"objective": objective},
    }
    scenario = read_scenario(scenario_file, options)
    for path in (as_json, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: its folder does not exist; make it first")
    require_writable(as_json, plot)
    kind = None if workload is None else recognise(workload)
    console = Console(highlight=False)
    left_out = {*(["cost"] if scenario.cloud is None else []), *([] if "pollux" in names else ["idle_s"])}
    shown = [column for column in COLUMNS if column.key not in left_out]

    def played(jobs: Sequence[Submission]) -> dict[str, dict[str, Any]]:
        with _watched(names, len(jobs)) as on_progress:
            results = compare(jobs, profiles, names, scenario, on_progress=on_progress)
        console.print(table([_row(name, results[name]) for name in names], shown, console.width))
        return results

    applications = applications_of(profiles)
    if workload is None or kind is None:
        jobs, title = _jobs(workload, generate_jobs, applications, scenario)
        results = played(jobs)
        found: dict[str, Any] = {"policies": results}
        console.print(f"\n{title}, on {_hardware(scenario)}. {_COLUMNS_SAY}", markup=False)
    else:
        if scenario_file is None and None in (nodes, gpus_per_node):
            raise ConfigError(
                f"{workload.name} does not say how large the cluster was: give --nodes and --gpus-per-node, or a "
                "--scenario"
            )
        title, log = workload.name, read_log(workload, kind)
        found = {"left_out": _tell_log(console, log, applications, scenario)}
        for tuned in (False, True):
            jobs, found["tuned" if tuned else "untuned"] = _assumed(
                console, log, applications, scenario, tuned
            )
            found["tuned" if tuned else "untuned"]["policies"] = results = played(jobs)
        console.print(f"\n{_LOG_SAYS} {_COLUMNS_SAY}", markup=False)
        if few := of_few_jobs(len(jobs)):
            console.print(few, markup=False)
    if as_json is not None:
        document = {"workload": title, "scenario": asdict(scenario)} | found
        write_page(as_json, json.dumps(jsonable(document), indent=1, allow_nan=False) + "\n")
    if plot is not None:
        assumed = "" if kind is None else ", if users tuned"
        plots.page(results, f"{title}: {len(jobs)} jobs on {_hardware(scenario)}{assumed}", plot)
        console.print(f"wrote {plot}", markup=False)


_ASSUMED = {
    True: "If users tuned (the best batch size for their GPUs, half of linear speedup or better):",
    False: "If users did not tune (the batch size of one GPU times their GPUs):",
}
_LOG_SAYS = "The log does not say which of the two holds: what it can tell lies between them."
_COLUMNS_SAY = (
    "JCT is a job's time from its submission to its end. GPU-HOURS are those that jobs held. EFFICIENCY is how much an "
    "example helped against one in the smallest batch. FAIRNESS is a job's time over its time alone on an equal share "
    "of the cluster. DECISION is the median CPU time of one decision."
)


def _tell_log(
    console: Console, log: Log, applications: Mapping[str, Application], scenario: Scenario
) -> Mapping[str, int]:
    """Say what of the log is simulated; return the number of rows that are not, by reason."""
    fit = len(fitting(log, applications, scenario.gpus))
    left_out = dict(log.left_out)
    if larger := len(log.jobs) - fit:
        left_out["more GPUs than the cluster has, or any application can use"] = larger
    rows = len(log.jobs) + sum(log.left_out.values())
    why = "".join(f"; {count} left out: {reason}" for reason, count in left_out.items())
    console.print(f"Trainings: {fit}, of {rows} rows{why}.", markup=False)
    if (most := scenario.trace.most_jobs) is not None and most < fit:
        console.print(f"The first {most} are simulated: the scenario's most_jobs.", markup=False)
    if not log.has_states:
        console.print(
            "The log has no states, so failed and cancelled jobs count as trainings; for sacct, add State to --format.",
            markup=False,
        )
    return left_out


def _assumed(
    console: Console, log: Log, applications: Mapping[str, Application], scenario: Scenario, tuned: bool
) -> tuple[tuple[Submission, ...], dict[str, Any]]:
    """Return the log's jobs under an assumption, and say it, with the GPU hours that show how far it goes."""
    replay = replayed(
        log,
        applications,
        tuned=tuned,
        cluster_gpus=scenario.gpus,
        gpus_per_node=scenario.gpus_per_node,
        most_jobs=scenario.trace.most_jobs,
    )
    jobs = stiffened(replay.jobs, applications, scenario.trace, scenario.seed)
    counts = Counter(job.application for job in jobs)
    elastic = sum(not job.rigid for job in jobs)
    console.print(
        f"\n{_ASSUMED[tuned]} {', '.join(f'{count} {name}' for name, count in sorted(counts.items()))}, the nearest in "
        f"duration. Elastic: {elastic} of {len(jobs)}; rigid_share in [trace] of a scenario file makes more rigid.\n"
        f"GPU hours: {replay.recorded_gpu_hours:.4g} in the log. The same work needs {replay.least_gpu_hours:.4g} on "
        "one GPU each at its best batch size.",
        markup=False,
    )
    return jobs, {"recorded_gpu_hours": replay.recorded_gpu_hours, "least_gpu_hours": replay.least_gpu_hours}


def _jobs(
    workload: Path | None,
    generated: int | None,
    applications: Mapping[str, Application],
    scenario: Scenario,
) -> tuple[tuple[Submission, ...], str]:
    """Return the jobs of a trace, or so many generated ones, and what to call them."""
    if (workload is None) == (generated is None):
        raise ConfigError("what to simulate? give a WORKLOAD or --generate JOBS, one of them")
    trace, gpus = scenario.trace, scenario.gpus
    if workload is not None:
        found = read_workload(workload, applications, cluster_gpus=gpus)[: trace.most_jobs]
        return stiffened(found, applications, trace, scenario.seed), workload.name
    assert generated is not None
    made = generate(
        applications,
        generated,
        trace.hours,
        cluster_gpus=gpus,
        seed=scenario.seed,
        sweep=trace.sweep,
        length=trace.length,
    )
    return stiffened(
        made, applications, trace, scenario.seed
    ), f"{generated} jobs generated over {trace.hours:g} h"


def _row(name: str, result: dict[str, Any]) -> Row:
    return {
        "policy": name,
        **result,
        "fairness_mean": result["finish_time_fairness"]["mean"],
        "fairness_worst": result["finish_time_fairness"]["worst"],
        "decision_median": result["decision_ms"]["median"],
    }


def _hardware(scenario: Scenario) -> str:
    if not scenario.groups:
        return f"{scenario.nodes} x {scenario.gpus_per_node} GPUs"
    return ", ".join(f"{g.nodes} x {g.gpus_per_node} {g.gpu_type}" for g in scenario.groups)


@contextmanager
def _watched(names: Sequence[str], jobs: int) -> Iterator[OnProgress]:
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
