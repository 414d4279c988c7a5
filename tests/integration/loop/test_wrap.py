"""`pollux wrap` on real Slurm: trainers with a loop of their own, each beside the same trainer run alone."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from contrib.devcluster import DevCluster

from .conftest import Loop, loop_on, polluxd

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

DIRECTIVE = "#POLLUX min-gpus=1 max-gpus=4 adaptive=no resize=requeue gpu-counts=1,2,4"


STEPS = 300


class Trained:
    """A wrapped training; `ended` waits for its end."""

    def __init__(self, loop: Loop, name: str, wrap: str = "", trainer: str = "") -> None:
        self._loop, self._out = loop, loop.folder / name
        body = (
            f"pollux wrap --checkpoints '{self._out}/step-*.json' --batch 48 --steps {STEPS} {wrap} -- "
            f"python tests/integration/loop/own_loop.py --out {self._out} --steps {STEPS} {trainer}"
        )
        self._name, self._job_id = name, loop.sbatch(name, body, directive=DIRECTIVE)

    def explained(self, words: str) -> None:
        told = self._loop.daemon.explain
        self._loop.until(lambda: words in told(self._job_id), 120.0, why=words)

    def ended(self) -> Self:
        self.restarts = self._loop.completed(self._job_id, 400.0).restart_count
        self.log = (self._loop.folder / f"{self._name}.log").read_text()
        rows = [line.split() for line in (self._out / "made.txt").read_text().splitlines()]
        self.made = Counter(int(step) for step, *_ in rows)
        self.sizes = [int(gpus) for _, gpus, _ in rows]
        digest = ""
        for step in range(STEPS):
            digest = hashlib.sha256(f"{digest} {step}".encode()).hexdigest()
        assert f"finished {digest}" in self.log, "the same samples in the same order as alone"
        assert set(self.made) == set(range(1, STEPS + 1))
        return self


@pytest.fixture(scope="module")
def trainings(scratch: Path) -> Iterator[dict[str, Trained]]:
    """Three trainings at the same time, with a node each to grow on."""
    folder = scratch / "wrap-jobs"
    folder.mkdir()
    with DevCluster(
        scratch / "wrap", nodes=4, gpus_per_node=4, lease_s=60, publish_interval_s=1.0
    ) as cluster:
        for loop in loop_on(cluster, polluxd(cluster, folder, cooldown=1.0), folder):
            yield {
                "silent": Trained(loop, "silent"),
                "asked": Trained(loop, "asked", "--signal TERM", "--saves-on-term"),
                "rigid": Trained(loop, "rigid", trainer="--rigid"),
            }


def test_a_trainer_that_starts_at_no_other_size_goes_back_and_stays(trainings: dict[str, Trained]) -> None:
    # First of the tests, as a job that has ended is explained in other words.
    trainings["rigid"].explained(
        "did not start on 2 GPUs (status 1: cannot resume at another data-parallel degree)"
    )
    trained = trainings["rigid"].ended()
    assert set(trained.sizes) == {1}
    assert trained.log.count("cannot resume at another data-parallel degree") == 1
    assert "polluxd will not start it on" in trained.log


def test_a_trainer_that_is_asked_nothing_grows_at_its_own_checkpoints(trainings: dict[str, Trained]) -> None:
    trained = trainings["silent"].ended()
    assert max(trained.sizes) == 4
    assert trained.restarts >= 1
    # The order waits for a checkpoint, which comes each 20 steps; Slurm ends the job within seconds of it.
    assert sum(count - 1 for count in trained.made.values()) <= 19 * trained.restarts


def test_a_trainer_that_saves_on_a_signal_makes_no_step_twice(trainings: dict[str, Trained]) -> None:
    trained = trainings["asked"].ended()
    assert max(trained.sizes) == 4
    assert trained.restarts >= 1
    assert set(trained.made.values()) == {1}
    assert "saved at step" in trained.log, "and its exit status of 0 was no end of the training"
