"""One rank leaves the loop over the loader, and the others do not."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from typing import Any

import pytest
from torch.nn.functional import mse_loss

from pollux.errors import LoopMistake, RankLost
from pollux.loop import slips
from pollux.ranks.control import OTHER_PLACE
from tests.unit.agent.loop.mistakes_page import on_the_page
from tests.unit.agent.regression import attached, data

IMPATIENT = {"POLLUX_PATIENCE": "0.3"}


def train(leaves: int, at: str, passes: int = 1, epochs: int = 2) -> tuple[str, str]:
    """Have the rank `leaves` leave a loop of the first epoch; return how it ends, and what this rank said of a wait.

    `at`: before the pass, in the middle of a step, or at its end.
    """
    waited: list[str] = []
    logging.getLogger("pollux").addFilter(
        lambda record: record.msg != slips.WAITS or waited.append(record.getMessage()) is None
    )
    job = attached()
    loader = job.loader(data(), 16, per_gpu=(1, 8 // passes))
    here = job.rank == leaves
    try:
        for epoch in job.epochs(epochs):
            for k, (x, y, _) in enumerate(loader):
                if at == "before" and k == 9 and here and not epoch:
                    break
                job.step(lambda x=x, y=y: mse_loss(job.model(x), y))
                middle = k % passes < passes - 1
                if k >= 9 and middle == (at == "middle") and here and not epoch and at != "before":
                    break
        job.close()
    except (LoopMistake, RankLost) as error:
        return str(error), "".join(waited)
    return "silence", "".join(waited)


@pytest.mark.parametrize(
    ("at", "passes", "epochs", "interval"),
    [("before", 1, 2, 1), ("middle", 2, 2, 1), ("end", 1, 2, 1), ("end", 1, 1, 1), ("end", 1, 2, 0)],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_break_on_one_rank_ends_with_the_reason(
    ranks: Any, rank: int, at: str, passes: int, epochs: int, interval: int
) -> None:
    often = {} if interval else {"POLLUX_EXCHANGE_INTERVAL": "0"}
    found = ranks(2, train, rank, at, passes, epochs, env=IMPATIENT | often)
    used = {"before": 144, "middle": 80, "end": 160}[at]
    told = OTHER_PLACE.format(1 - rank, used, 1, rank, used)
    assert told in found[rank][0]
    assert found[1 - rank][0] != "silence"
    if interval:
        assert on_the_page(found[rank][1].replace("0 s", "30 s").replace("rank 0", "rank 1"))


def test_the_page_quotes_the_reason() -> None:
    assert on_the_page(OTHER_PLACE.format(1, 160, 1, 0, 160))


def evaluates(where: str) -> bool:
    """Rank 0 evaluates for many of the intervals, in the loop or after it; all ranks leave the first loop early."""
    job = attached()
    loader = job.loader(data(), 16, per_gpu=(1, 4))

    def evaluate(here: str) -> None:
        if here == where and job.is_main:
            time.sleep(2.0)

    for epoch in job.epochs(2):
        for k, (x, y, _) in enumerate(loader):
            if k == 8 and not epoch:
                evaluate("before a break")
                break
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))
            if k == 3:
                evaluate("in the loop")
            if k == len(loader) - 1:
                evaluate("in the last pass")
        evaluate("after the loop")
    job.close()
    return job.progress.finished


@pytest.mark.parametrize("where", ["before a break", "in the loop", "in the last pass", "after the loop"])
def test_a_long_evaluation_on_one_rank_ends_nothing(ranks: Any, where: str) -> None:
    assert ranks(3, evaluates, where, env=IMPATIENT) == [True] * 3


def leaves_a_pass_out(where: int) -> str:
    """Leave out a step's only pass on one rank."""
    job = attached(measuring={"every": 1000})
    loader = job.loader(data(), 16)
    try:
        for _ in job.epochs(3, statistical=True):
            for k, (x, y, _) in enumerate(loader):
                if k == 9 and job.rank == where:
                    continue
                job.step(lambda x=x, y=y: mse_loss(job.model(x), y))
    except (LoopMistake, RankLost) as error:
        return str(error)
    return "silence"


def test_a_step_that_one_rank_leaves_out_ends_with_the_reason(ranks: Any) -> None:
    for where in (0, 1):
        found = ranks(2, leaves_a_pass_out, where, env={"POLLUX_EXCHANGE_INTERVAL": "0"})
        assert any("has left out a pass" in each for each in found)
        assert "silence" not in found


def stands(how: str, culprit: int) -> list[str]:
    """A rank stands still for a while, in its script or stopped; return what this rank said of it."""
    said: list[str] = []
    logging.getLogger("pollux").addFilter(
        lambda record: record.msg != slips.BEHIND or said.append(record.getMessage()) is None
    )
    job = attached()
    loader = job.loader(data(), 16, per_gpu=(1, 8))
    for epoch in job.epochs(1):
        for k, (x, y, _) in enumerate(loader):
            if k == 5 and job.rank == culprit and not epoch:
                if how == "stopped":
                    wake = f"sleep 4; kill -CONT {os.getpid()}"
                    with subprocess.Popen(["sh", "-c", wake]):
                        os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    time.sleep(4.0)
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))
    job.close()
    return said


@pytest.mark.parametrize(("how", "culprit"), [("stopped", 1), ("stopped", 0), ("asleep", 2)])
def test_the_rank_for_which_the_others_wait_is_named_with_its_node(
    ranks: Any, how: str, culprit: int
) -> None:
    found = ranks(4, stands, how, culprit, nodes=2, env=IMPATIENT | {"SLURMD_NODENAME": "n7"})
    assert all(f"rank {culprit} on n7" in line for said in found for line in said)
    assert sum(map(len, found)) == 1, "one rank says it, once"
    assert bool(found[1 if culprit == 0 else 0])
    assert ("SIGSTOP" in "".join(line for said in found for line in said)) == (how == "stopped")
    assert not found[culprit]
