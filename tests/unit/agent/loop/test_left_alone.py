"""One rank leaves the loop over the loader, and the others do not."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss

from pollux import attach
from pollux.errors import LoopMistake, RankLost
from pollux.loop import slips
from pollux.ranks.control import OTHER_PLACE
from tests.unit.agent.loop.mistakes_page import on_the_page
from tests.unit.agent.regression import data, network


def break_on(where: int, folder: str) -> str:
    """Leave the loop on one rank; return the error."""
    here = Path(folder)

    def keep(record: logging.LogRecord) -> bool:
        if record.msg == slips.WAITS:
            (here / "waits").write_text(record.getMessage())
        return True

    logging.getLogger("pollux").addFilter(keep)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    job = attach(
        model, optimizer, adaptive=False, measuring={"every": 1000}
    )  # no other collective of the agent
    loader = job.loader(data(), 16)
    try:
        for _ in job.epochs(3, statistical=True):
            for k, (x, y, _) in enumerate(loader):
                if where and k == 10 and job.rank == 0:
                    while not (here / "waits").exists():
                        time.sleep(0.01)
                    raise RankLost("as if the collectives had timed out")
                job.step(lambda x=x, y=y: mse_loss(job.model(x), y))
                if k == 9 and job.rank == where:
                    break
    except (LoopMistake, RankLost) as error:
        return str(error)
    return "silence"


def test_a_break_on_rank_0_alone_ends_with_the_reason(ranks: Any, tmp_path: Path) -> None:
    found = ranks(2, break_on, 0, str(tmp_path), env={"POLLUX_EXCHANGE_INTERVAL": "0"})
    assert OTHER_PLACE.format(1, 160, 1, 0, 160) in found
    assert on_the_page(OTHER_PLACE.format(1, 160, 1, 0, 160))
    assert "silence" not in found


def test_a_rank_that_waits_after_a_break_of_its_own_says_so(
    ranks: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("pollux.loop.coordinator.PATIENCE_S", 0.5)
    seldom = {"POLLUX_EXCHANGE_INTERVAL": "1000"}  # no decision of rank 0 arrives while rank 1 waits
    assert "silence" not in ranks(2, break_on, 1, str(tmp_path), env=seldom)
    assert on_the_page((tmp_path / "waits").read_text().replace("0 s", "30 s"))


def leaves_a_pass_out(where: int) -> str:
    """Leave out a step's only pass on one rank."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    job = attach(model, optimizer, adaptive=False, measuring={"every": 1000})
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
