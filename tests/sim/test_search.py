"""`polluxctl simulate --search`: searches over hyper-parameters, with stopping, under Pollux and with fixed GPUs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from pollux.search.study import PRUNERS, SAMPLERS, SearchSettings
from polluxd.cli import ctl
from polluxd.sim import search
from polluxd.sim.cluster import Scenario, SearchTrace
from polluxd.sim.engine import View
from polluxd.sim.policies import POLICIES, daemon_view
from polluxd.sim.policies.pollux import Pollux
from polluxd.sim.profiles import load_profiles
from polluxd.sim.search import SimulatedSearch, compare_searches

EPOCHS, TRIALS = 20, 12


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    """One application whose accuracy rises from 0.5 to 0.95, and which scales well."""
    folder = tmp_path / "profiles" / "toy"
    folder.mkdir(parents=True)
    rows = [
        (place, batch, 0.1 + 0.01 * batch, 0.02 * (gpus > 1))
        for place, gpus in (("1", 1), ("2", 2), ("4", 4), ("44", 8))
        for batch in (4, 8, 16, 32, 64)
    ]
    (folder / "placements.csv").write_text(
        "placement,local_bsz,step_time,sync_time\n"
        + "".join(f"{p},{b},{t + sync},{sync}\n" for p, b, t, sync in rows)
    )
    (folder / "scalability.csv").write_text(
        "num_nodes,num_replicas,local_bsz,step_time,sync_time\n1,1,4,0.14,0\n1,4,4,0.16,0.02\n"
        "2,8,4,0.16,0.02\n2,8,64,0.76,0.02\n1,4,64,0.76,0.02\n1,1,64,0.74,0\n"
    )
    for batch in (32, 256):
        (folder / f"validation-{batch}.csv").write_text(
            "progress,iteration,metric,grad_sqr,grad_var\n"
            + "".join(
                f"{100 * n},{100 * n * 32 / batch * (1 + batch / 512)},{0.95 - 0.45 * 0.8 ** (n - 1)},1,4\n"
                for n in range(1, EPOCHS + 1)
            )
        )
    return folder.parent


def scenario(**trace: Any) -> Scenario:
    return Scenario(
        nodes=2, search=SearchTrace(**{"application": "toy", "trials": TRIALS, "parallel": 8, **trace})
    )


def row(found: list[dict[str, Any]], method: str, policy: str) -> Mapping[str, Any]:
    return next(r for r in found if (r["search"], r["policy"]) == (method, policy))


@pytest.mark.parametrize(
    "method", [*(f"{sampler}/asha" for sampler in SAMPLERS), *(f"random/{p}" for p in PRUNERS)]
)
def test_every_sampler_and_pruner_searches_to_the_end(profiles: Path, method: str) -> None:
    (found,) = compare_searches([method], profiles, ["pollux"], scenario())
    assert found["best_gain"] > 0.5
    assert 0 < found["to_best_s"] <= found["ended_s"]
    if method.endswith(("none", "pbt")):
        assert found["complete"] == TRIALS
        # A trial that goes on from another one is stopped, and has a successor.
        assert (found["stopped"] > 0) == method.endswith("pbt")
    else:
        assert found["complete"] + found["stopped"] == TRIALS


def test_stopping_saves_gpu_hours_and_fixed_sizes_are_compared(profiles: Path) -> None:
    methods = ["random/asha", "random/none"]
    found = compare_searches(methods, profiles, ["pollux", "fifo"], scenario())
    assert found == compare_searches(methods, profiles, ["pollux", "fifo"], scenario()), "a seed, a result"
    names = ["pollux", "fifo, 4 GPUs each", "fifo, 1 GPU each"]
    assert [r["policy"] for r in found] == names * 2
    for name in names:
        stopped, whole = row(found, "random/asha", name), row(found, "random/none", name)
        assert stopped["gpu_hours"] < 0.7 * whole["gpu_hours"]
        assert stopped["stopped"] > 0 == whole["stopped"]


def test_polluxd_sees_one_search_and_the_ranks_of_its_trials(
    profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks: list[float] = []
    most = 0

    class Watched(Pollux):
        def decide(self, view: View) -> Any:
            nonlocal most
            most = max(most, len(view.jobs))
            for job in view.jobs:
                assert daemon_view.slurm_job(job, view).spec.search == "simulated"
                seen = daemon_view.report(job, view, remaining=True)
                if seen is not None and seen.search_rank is not None:
                    ranks.append(seen.search_rank)
            return super().decide(view)

    monkeypatch.setattr(search, "POLICIES", {**POLICIES, "pollux": lambda _: Watched()})
    compare_searches(["random/none"], profiles, ["pollux"], scenario(parallel=3))
    assert most == 3, "as many as the array has at a time"
    assert min(ranks) < 0.5
    assert max(ranks) == 1.0


def test_the_right_values_learn_as_the_measured_training_and_wrong_ones_less(profiles: Path) -> None:
    app = load_profiles(profiles)["toy"]
    found = SimulatedSearch(app, SearchSettings(), 1)
    assert found.study.settings.maximize
    right = dict(found._right)
    assert found.learns(right) == (1.0, 1.0)
    for epoch in (1, 7, EPOCHS):
        assert found.value(100.0 * epoch) == pytest.approx(0.95 - 0.45 * 0.8 ** (epoch - 1))
    assert found.gain(found.value(100.0 * EPOCHS)) == pytest.approx(1.0)
    assert found.learns({**right, "log10_rate": right["log10_rate"] - 2}) == pytest.approx((0.1, 1.0))
    assert found.learns({**right, "log10_rate": right["log10_rate"] + 0.5}) == pytest.approx(
        (np.sqrt(np.sqrt(10)), 0.85)
    )
    assert found.learns({**right, "log10_rate": right["log10_rate"] + 1.2}) == (0.0, 0.0)
    assert found.learns({**right, "log10_decay": right["log10_decay"] - 2}) == pytest.approx((1.0, 0.8))


def command(*words: object) -> Any:
    return CliRunner().invoke(ctl.app, ["simulate", *map(str, words)])


def test_table_and_json(profiles: Path, tmp_path: Path) -> None:
    assumed, out = tmp_path / "scenario.toml", tmp_path / "out.json"
    assumed.write_text('nodes = 2\n[search]\napplication = "toy"\ntrials = 4\nfixed_gpus = [2]\n')
    shown = command(
        *("--profiles", profiles, "--scenario", assumed, "--search", "tpe/asha", "--policy", "fifo"),
        *("--json", out),
    )
    assert shown.exit_code == 0, shown.output
    assert "tpe/asha" in shown.output
    assert "fifo, 2 GPUs each" in shown.output
    (figures,) = json.loads(out.read_text())["searches"]
    assert figures["complete"] + figures["stopped"] == 4


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--search", "tpe/asha"], "give --profiles"),
        (["--search", "tpe/asha", "--generate", "3"], "--search takes no trace"),
        (["--search", "tpe/asha", "--daemon"], "--search takes no trace"),
        (["--profiles", "PROFILES", "--search", "tpe"], "expected SAMPLER/PRUNER"),
        (["--profiles", "PROFILES", "--search", "tpe/asha"], "an application of"),
    ],
)
def test_errors_say_what_was_expected(profiles: Path, words: list[str], expected: str) -> None:
    shown = command(*(str(profiles) if word == "PROFILES" else word for word in words))
    assert shown.exit_code == 1
    assert expected in " ".join(str(shown.exception or shown.output).split())
