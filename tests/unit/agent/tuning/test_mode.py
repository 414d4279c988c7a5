"""Modes observe, advise and enforce: who sets them and what they allow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from pollux import attach
from pollux.errors import PolluxAgentError
from pollux.goodput import BatchChoice, BatchLimits, NoiseScale, ThroughputParams
from pollux.tuning.batch_choice import HYSTERESIS, Advisor
from pollux.tuning.measurements import Configuration
from pollux.tuning.mode import Mode, mode_for
from pollux.tuning.profile import StepProfile

PARAMS = ThroughputParams(0.05, 0.001, 0.04, 0.0, 0.1, 0.0, 1.0)
NOISY = NoiseScale(sqr=1.0, var=20.0)


def test_the_environment_then_enforce() -> None:
    assert mode_for(None, True, {"POLLUX_MODE": "advise"}) == (Mode.ADVISE, False)
    assert mode_for(None, True, {}) == (Mode.ENFORCE, True)
    assert mode_for(None, False, {}) == (Mode.ENFORCE, False), "plain training outside of Pollux"
    assert mode_for(True, False, {}) == (Mode.ENFORCE, True), "a script may ask for it there"
    assert mode_for(False, True, {}) == (Mode.ENFORCE, False), "adaptive=False has the last word"
    assert mode_for(True, True, {"POLLUX_MODE": "Observe"}) == (Mode.OBSERVE, False)
    with pytest.raises(PolluxAgentError, match=r"POLLUX_MODE.*observe, advise, enforce.*'asdvise'"):
        mode_for(None, True, {"POLLUX_MODE": "asdvise"})


def begin(maximum: int | None, **options: Any) -> tuple[bool, int]:
    """Return whether a script's batch size may change, and its limit.

    The script says nothing else about it: `options` are those of `attach`.
    """
    model = nn.Linear(4, 1)
    job = attach(model, torch.optim.SGD(model.parameters(), lr=0.01), **options)
    job.loader(TensorDataset(torch.randn(320, 4), torch.randn(320, 1)), 32, max_batch_size=maximum)
    job.close()
    return job.adaptive, job.report()["limits"]["maximum"]


def test_a_script_outside_of_slurm_adapts_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "POLLUX_ADAPTIVE", "POLLUX_MODE", "POLLUX_GATEWAY"):
        monkeypatch.delenv(name, raising=False)
    assert begin(320) == (True, 320)
    assert begin(None) == (False, 32), "no larger batch was allowed"
    assert begin(320, adaptive=False) == (False, 32)
    monkeypatch.setenv("POLLUX_ADAPTIVE", "no")
    assert begin(320) == (False, 32)
    assert begin(320, adaptive=True) == (True, 320), "the script's own word counts for more"
    monkeypatch.setenv("POLLUX_MODE", "observe")
    assert begin(320, adaptive=True) == (False, 32)


def test_a_slurm_job_that_did_not_opt_in_trains_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLLUX_ADAPTIVE", "POLLUX_MODE", "POLLUX_GATEWAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert begin(320) == (False, 32)
    monkeypatch.setenv("POLLUX_ADAPTIVE", "yes")
    assert begin(320) == (True, 320)


def train(
    mode: str, sampling: int = 1, adaptive: bool = True
) -> tuple[Any, list[tuple[int, ...]], dict[str, Any]]:
    """Run 40 passes at a batch of 32 that learn of a high noise scale.

    Once the agent has measured the noise, the test sets a noise at which larger batches are worthwhile.
    """
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(320, 4, generator=generator)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLLUX_MODE", mode)
        job = attach(model, optimizer, adaptive=adaptive, measuring={"every": sampling})
    loader = job.loader(dataset, 32, max_batch_size=320, per_gpu=(4, 320))
    advisor = job.training.advisor
    assert advisor is not None
    advisor.close()  # its thread: here the test asks for advice
    shapes, told = [], False
    for _ in job.epochs(40):
        for inputs, targets in loader:
            with job.micro_batch():
                shapes.append((len(inputs), job.batch_size, *job.lr_factors))
                job.backward(mse_loss(job.model(inputs), targets))
            if job.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
            if not told and job.noise_scale is not None:
                told = True
                job.profile.fit = lambda: PARAMS  # type: ignore[method-assign]
                job.training.models[0].meter.agreed = (NOISY,)
                job.training.models[0].averages.add = lambda *_: None  # type: ignore[method-assign]
                job.training.models[0].averages.groups = lambda: [NOISY]  # type: ignore[method-assign]
                advisor.advise()
    assert told, "the noise is measured in every mode"
    report = job.report()
    job.close()
    return job, shapes, report


def test_observe_changes_nothing() -> None:
    job, shapes, report = train("observe")
    assert set(shapes) == {(32, 32)}, "no batch is cut, not even to measure it"
    assert job.noise_scale is not None
    assert (report["mode"], report["advice"]) == ("observe", None)
    assert report["limits"]["maximum"] == 32, "the scheduler counts on the one batch size"


def test_a_report_counts_the_gpus_that_its_fit_knows() -> None:
    model = nn.Linear(4, 1)
    job = attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    job.loader(TensorDataset(torch.zeros(64, 4)), 32)
    advisor = job.training.advisor
    assert advisor is not None
    advisor.close()
    job.profile.add(Configuration(1, 2, 16), final=[0.1])
    explored = [job.report()["explored_gpus"], advisor.advise() and job.report()["explored_gpus"]]
    job.close()
    assert explored == [0, 2]


def test_a_batch_that_is_to_stay_is_not_cut_either() -> None:
    job, shapes, _ = train("enforce", adaptive=False)
    assert set(shapes) == {(32, 32)}, "batch norm would see the halves"
    assert job.noise_scale is not None


def test_advise_says_what_it_would_do(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="pollux"):
        _, shapes, report = train("advise")
    assert set(shapes) == {(32, 32)}
    assert report["mode"] == "advise"
    assert report["advice"]["batch_size"] > 64, "where growth would lead, not its first step"
    assert report["advice"]["goodput_ratio"] > HYSTERESIS
    assert any("would train with batches of" in line for line in caplog.messages)


def test_enforce_does_it() -> None:
    _, shapes, report = train("enforce")
    assert max(size for _, size, *_ in shapes) > 32
    assert any(factors and factors[0] > 1.0 for _, _, *factors in shapes)
    assert (report["mode"], report["advice"]) == ("enforce", None)
    assert report["limits"]["maximum"] == 320


def test_advice_is_logged_once_and_ends_where_it_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    profile = StepProfile()
    for m in (8, 16):
        profile.add(Configuration(1, 4, m), local=[0.05 + 0.001 * m] * 4, final=[0.09 + 0.001 * m] * 4)
    now = BatchChoice(8, 0)
    limits = BatchLimits(32, 1024, 4, 128)
    advisor = Advisor(profile, limits, 1, 4, lambda: (NOISY, now), adaptive=False, advises=True)
    with caplog.at_level("INFO", logger="pollux"):
        assert advisor.advise()
        assert advisor.advise()
    assert len([line for line in caplog.messages if "would train" in line]) == 1
    assert advisor.proposal is None
    assert advisor.advice is not None
    now = advisor.advice.choice
    assert advisor.advise()
    assert advisor.advice is None
