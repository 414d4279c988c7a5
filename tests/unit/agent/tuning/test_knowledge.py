"""Knowledge from earlier runs: its owner, its use, its correction.

A run takes over the knowledge that is meant for it, and outgrows knowledge that is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from pollux.goodput import (
    BatchChoice,
    BatchLimits,
    NoiseScale,
    ThroughputParams,
    accumulation_time,
    step_time,
)
from pollux.slurm_job.access import GatewayAccess, Grant
from pollux.tuning.batch_choice import Advisor
from pollux.tuning.knowledge import fingerprint, gpu_type, introduction
from pollux.tuning.measurements import Configuration, ProfileRows
from pollux.tuning.prior import HALF_LIFE, Prior
from pollux.tuning.profile import StepProfile

TRUTH = ThroughputParams(0.05, 0.001, 0.02, 0.003, 0.06, 0.005, 2.0)
LIMITS = BatchLimits(32, 1024, 4, 128)
NOISE = NoiseScale(sqr=1.0, var=20.0)


def model(width: int = 4, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 1)).to(dtype)


def test_a_fingerprint_is_of_script_shapes_and_per_gpu_batches_only() -> None:
    same = fingerprint(model(), LIMITS, ["/home/a/train.py", "--epochs", "3"])
    assert same == fingerprint(model(), BatchLimits(64, 128, 4, 128), ["run-7/train.py"])
    others = {
        same,
        fingerprint(model(5), LIMITS, ["train.py"]),
        fingerprint(model(dtype=torch.float64), LIMITS, ["train.py"]),
        fingerprint(model(), LIMITS, ["evaluate.py"]),
        fingerprint(model(), BatchLimits(32, 1024, 4, 64), ["train.py"]),
    }
    frozen = model()
    next(frozen.parameters()).requires_grad_(False)
    others.add(fingerprint(frozen, LIMITS, ["train.py"]))
    assert len(others) == 6
    assert all(len(f) == 32 and set(f) <= set("0123456789abcdef") for f in others)


def test_the_gpu_type_is_slurms_where_it_has_one() -> None:
    granted = GatewayAccess(("http://127.0.0.1:9",), "", 7, 0, Grant("J.7.0." + "a" * 43, gpu_type="a100"))
    assert gpu_type(torch.device("cpu"), granted) == "a100"
    assert gpu_type(torch.device("cpu"), None) == ""


def test_a_job_may_opt_out_and_an_answer_without_sense_is_none() -> None:
    profile = StepProfile()
    assert introduction(model(), LIMITS, profile, {"POLLUX_PRIOR": "no"}) is None
    told = introduction(model(), LIMITS, profile, {"POLLUX_PRIOR": "yes"})
    assert told is not None
    good = {
        "params": dict(zip(TRUTH._fields[:7], TRUTH[:7], strict=True)),
        "explored_gpus": 8,
        "explored_nodes": 2,
    }
    for answer in (
        None,
        {},
        {**good, "explored_gpus": 0},
        {**good, "params": {**good["params"], "alpha_grad": -1.0}},
        {**good, "params": {**good["params"], "gamma": math.inf}},
        {**good, "params": {**good["params"], "rogue": 1.0}},
        {**good, "params": 3},
    ):
        told.learn(answer)
        assert profile.prior is None
    told.learn(good)
    assert profile.prior is not None
    assert profile.fit() == pytest.approx((*TRUTH[:7], None, None), abs=1e-6)


@dataclass
class Run:
    """A job with a planted truth that refits its model at each report.

    At each report the job measures steps, refits the model and follows the proposed batch size.
    """

    nodes: int = 1
    gpus: int = 1
    at: float = 0.0
    choice: BatchChoice = field(default_factory=lambda: BatchChoice(32, 0))
    sizes: list[int] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.profile = StepProfile(clock=lambda: self.at)
        self.random = np.random.default_rng(1)
        self.advisor = self._advisor()

    def _advisor(self) -> Advisor:
        return Advisor(
            self.profile, LIMITS, self.nodes, self.gpus, lambda: (NOISE, self.choice), adaptive=True
        )

    def move(self, nodes: int, gpus: int) -> None:
        self.nodes, self.gpus, self.choice = (
            nodes,
            gpus,
            BatchChoice(max(self.choice.local_batch // gpus, 4), 0),
        )
        self.advisor = self._advisor()

    def report(self, seconds: float = 30.0) -> None:
        """Train for `seconds`, refit the model and follow the advice."""
        end = self.at + seconds
        while self.at < end:
            m = self.choice.local_batch
            key, off = Configuration(self.nodes, self.gpus, m), math.exp(0.03 * self.random.standard_normal())
            final = float(step_time(TRUTH, self.nodes, self.gpus, m)) * off
            self.profile.add(key, local=[float(accumulation_time(TRUTH, m)) * off])
            self.profile.add(key, final=[final])
            self.at += final
        self.advisor.advise()
        assert self.advisor.params is not None
        here = (self.nodes, self.gpus, self.choice.local_batch)
        predicted, true = (float(step_time(p, *here)) for p in (self.advisor.params, TRUTH))
        self.errors.append(abs(predicted / true - 1.0))
        self.sizes.append(self.choice.size(self.gpus))
        if self.advisor.proposal is not None:
            self.choice, self.advisor.proposal = self.advisor.proposal, None


def wrong(factor: float, *names: str) -> ThroughputParams:
    values = TRUTH._asdict()
    return TRUTH._replace(**{name: factor * values[name] for name in names or TRUTH._fields[:6]})


def test_a_right_prior_is_right_from_the_start() -> None:
    known, new = Run(), Run()
    known.profile.learn(Prior(TRUTH, 8, 2))
    for run in (known, new):
        run.report(seconds=1.0)
    # One batch size on one GPU says nothing of how larger ones and more GPUs compare.
    guess, true = (float(step_time(p, 2, 8, 16)) for p in (new.advisor.params, TRUTH))
    assert abs(guess / true - 1.0) > 0.2
    for place in ((1, 1, 128), (1, 4, 64), (2, 8, 64), (2, 8, 16)):
        true = float(step_time(TRUTH, *place))
        assert float(step_time(known.advisor.params, *place)) == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_a_prior_wrong_by_a_factor_of_five_is_outgrown_within_minutes(factor: float) -> None:
    """Compare errors and batch sizes with a run that has no prior.

    Both are compared at each report (every 30 s).
    """
    plain, told = Run(gpus=2), Run(gpus=2)
    told.profile.learn(Prior(wrong(factor), 8, 2))
    assert told.profile.fit() is not None
    misled = float(step_time(told.profile.fit(), 1, 2, 64)) / float(step_time(TRUTH, 1, 2, 64))
    assert misled == pytest.approx(factor, rel=1e-6)
    for _ in range(8):
        plain.report()
        told.report()
    assert told.errors == pytest.approx(plain.errors, abs=0.02)
    assert max(told.errors) < 0.1
    assert told.sizes[-1] > 2 * LIMITS.initial
    assert told.sizes == plain.sizes
    assert told.profile.prior is None
    assert told.profile.prior_refuted


def test_what_one_gpu_cannot_refute_fades_and_yields_where_it_is_measured() -> None:
    """A wrong prior for synchronisation does not hold a job on one GPU.

    The prior is five times too high. One GPU measures no synchronisation, so a prior that stood until measured would
    hold the job there.
    """
    run = Run()
    run.profile.learn(Prior(wrong(5.0, "alpha_local", "beta_local", "alpha_node", "beta_node"), 8, 2))
    run.report()
    assert not run.profile.prior_refuted
    dear = float(step_time(run.advisor.params, 1, 4, 64))
    run.at += 5 * HALF_LIFE
    run.report()
    faded = float(step_time(run.advisor.params, 1, 4, 64))
    assert faded < float(step_time(TRUTH, 1, 4, 64)) < dear
    run.profile.learn(Prior(wrong(5.0, "alpha_local", "beta_local", "alpha_node", "beta_node"), 8, 2))
    run.move(1, 4)
    for _ in range(4):
        run.report()
        assert run.errors[-1] < 0.1


def rows(*places: tuple[int, int, int, int], of: ThroughputParams = TRUTH, count: float = 8.0) -> ProfileRows:
    nodes, gpus, racks, m = (np.array(column, dtype=float) for column in zip(*places, strict=True))
    final = step_time(of, nodes, gpus, m, racks=racks)
    return ProfileRows(nodes, gpus, m, racks, np.full(m.size, np.nan), final, np.full(m.size, count))


def test_a_few_steps_refute_nothing() -> None:
    prior = Prior(wrong(5.0), 8, 2)
    assert not prior.refuted(rows((1, 1, 1, 64), count=7.0))
    assert prior.refuted(rows((1, 1, 1, 64)))
    assert not Prior(TRUTH, 8, 2).refuted(rows((1, 1, 1, 64), (1, 4, 1, 64), (2, 8, 1, 64)))
    assert not prior.refuted(StepProfile().rows())


def test_each_reach_of_a_placement_is_judged_by_itself() -> None:
    """Many steps on one GPU do not outvote a few across nodes or racks."""
    across = Prior(wrong(20.0, "alpha_node", "beta_node"), 8, 2)
    assert not across.refuted(rows((1, 1, 1, 64), (1, 4, 1, 64)))
    assert across.refuted(rows(*[(1, 1, 1, m) for m in range(8, 72, 8)], (2, 8, 1, 64)))
    spread = TRUTH._replace(alpha_rack=2.0, beta_rack=0.1)
    assert not Prior(spread, 8, 2).refuted(rows((2, 8, 2, 64), (2, 8, 1, 64), of=spread))
    assert Prior(TRUTH, 8, 2).refuted(rows((2, 8, 2, 64), of=spread))
