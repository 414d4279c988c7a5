"""State that differs between ranks: shards move, equal state is rank 0's, the rest is each rank's or refused.

The oracle of trainings is the same loop in plain torch in one process.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from pollux import attach
from pollux.errors import CheckpointError

EXAMPLES, M0, DECAY = 96, 24, 0.9
needs_fully_shard = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="fully_shard is supported from torch 2.13 on"
)


def data() -> TensorDataset:
    x = torch.randn(EXAMPLES, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))


def network(even: bool = False) -> nn.Sequential:
    """Of even shapes all shards on 2 and 4 ranks have one shape; else some are short or empty."""
    torch.manual_seed(0)
    wide = 8 if even else 3
    return nn.Sequential(
        nn.Linear(6, wide), nn.BatchNorm1d(wide, affine=False), nn.Linear(wide, 4 if even else 1)
    )


class PlainMoment(torch.optim.Optimizer):
    """Keeps its moment as a plain tensor of this rank's rows, as 8-bit optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                rows, gradient = local(p), local(p.grad)
                moment = self.state[p].setdefault("m", torch.zeros_like(gradient))
                rows.sub_(moment.mul_(0.9).add_(gradient), alpha=group["lr"])


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()  # type: ignore[no-any-return]


class Average:
    """A moving average of the parameters as they are, DTensors or not."""

    def __init__(self, model: nn.Module, rows: bool) -> None:
        self.values = {
            name: (local(p) if rows else p).detach().clone() for name, p in model.named_parameters()
        }
        self.rows = rows

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.values[name].lerp_((local(p) if self.rows else p).detach(), 1 - DECAY)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, value in self.values.items():
            value.copy_(state[name])


def train(
    directory: str, steps: int, even: bool = False, plain: bool = False, rows: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Train so many more steps under fully_shard; return weights and averages, whole."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = fully_shard(network(even)[::2])
    optimizer: Any = (
        PlainMoment(model.parameters()) if plain else torch.optim.SGD(model.parameters(), 0.05, 0.9)
    )
    average = Average(model, rows)
    job = attach(model, optimizer, adaptive=False, checkpoint_dir=directory, state={"ema": average})
    loader = job.loader(data(), M0, shuffle=False)
    last = min(job.progress.optimizer_steps + steps, 16)
    for _ in job.epochs(4):
        for x, y in loader:
            job.step(lambda x=x, y=y: mse_loss(job.model(x).mean(1, keepdim=True), y))
            average.update(model)
            if job.progress.optimizer_steps == last:
                break
        if job.progress.optimizer_steps == last:
            break
    job.close()
    return [whole(p) for p in model.parameters()], [whole(v) for v in average.values.values()]


def in_plain_torch(steps: int, even: bool) -> tuple[list[Tensor], list[Tensor]]:
    model = network(even)[::2]
    optimizer, average = torch.optim.SGD(model.parameters(), 0.05, 0.9), Average(model, False)
    x, y = data().tensors
    for step in range(steps):
        at = step * M0 % EXAMPLES
        mse_loss(model(x[at : at + M0]).mean(1, keepdim=True), y[at : at + M0]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)
    return [p.detach() for p in model.parameters()], list(average.values.values())


def close(found: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(found, right, strict=True))


@needs_fully_shard
@pytest.mark.parametrize("even", [True, False])
def test_a_moving_average_under_fully_shard_moves_between_ranks(
    ranks: Any, tmp_path: Path, even: bool
) -> None:
    for number, size in enumerate((2, 4, 3, 1)):
        found = ranks(size, train, str(tmp_path), 3, even)
        right = in_plain_torch(3 * (number + 1), even)
        for weights, averages in found:
            assert close(weights, right[0])
            assert close(averages, right[1]), f"on {size} ranks"


def refused(directory: str, plain: bool, rows: bool) -> str:
    with pytest.raises(CheckpointError) as told:
        train(directory, 3, even=True, plain=plain, rows=rows)
    return str(told.value)


@needs_fully_shard
@pytest.mark.parametrize("kind", ["optimizer", "state"])
def test_plain_tensors_of_own_rows_are_each_ranks(ranks: Any, tmp_path: Path, kind: str) -> None:
    plain, rows = kind == "optimizer", kind == "state"
    ranks(2, train, str(tmp_path), 5, True, plain, rows)
    found = ranks(2, train, str(tmp_path), 4, True, plain, rows)
    weights, averages = in_plain_torch(9, True)
    assert all(close(each[0], weights) for each in found)
    if rows:
        joined = [torch.cat([each[1][i] for each in found]) for i in range(len(averages))]
        assert close(joined, averages)
    for told in ranks(4, refused, str(tmp_path), plain, rows):
        assert "start on 2 ranks" in told
        assert ("state['ema']" in told) is rows


class Kept:
    """Values of a rank's own, and a job that uses them."""

    def __init__(self, directory: str, names: tuple[str, ...]) -> None:
        self.model = network()
        self.state: dict[str, Any] = {
            "best": 0.0,
            "log": [],
            "metric": 0.5,
            "draws": np.zeros(3),
            "replay": torch.zeros(0),
            "statistics": {},
        }
        self.state = {name: self.state[name] for name in names}
        optimizer = torch.optim.SGD(self.model.parameters(), 0.05)
        self.job = attach(self.model, optimizer, adaptive=False, checkpoint_dir=directory, state=self.state)
        self.loader = self.job.loader(data(), M0)

    def train(self, steps: int) -> dict[str, Any]:
        rank, state = self.job.rank, self.state
        before = dict(state)
        last = self.job.progress.optimizer_steps + steps
        for epoch in self.job.epochs(9):
            for x, y in self.loader:
                self.job.step(lambda x=x, y=y: mse_loss(self.job.model(x), y))
                if "replay" in state:
                    state["replay"] = torch.cat([state["replay"], torch.full((1 + rank,), float(rank))])
                if "draws" in state:
                    state["draws"] = state["draws"] + rank
                if "metric" in state:
                    state["metric"] = 0.25 + rank
                if "statistics" in state:
                    state["statistics"] = {name: b.clone() for name, b in self.model.named_buffers()}
                if rank == 0 and "best" in state:
                    state["best"], state["log"] = epoch + 1.0, [*state["log"], {"epoch": epoch}]
                if self.job.progress.optimizer_steps == last:
                    break
            if self.job.progress.optimizer_steps == last:
                break
        self.job.close()
        return before


def run(directory: str, names: tuple[str, ...], steps: int = 2) -> Any:
    said: list[str] = []

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("pollux").addHandler(Said())
    try:
        kept = Kept(directory, names)
    except CheckpointError as error:
        return None, str(error), ""
    before = kept.train(steps)
    return before, kept.job.training.tied, " ".join(said)


def test_what_ranks_have_apart_comes_back_on_each(ranks: Any, tmp_path: Path) -> None:
    names = ("draws", "replay")
    first = ranks(2, run, str(tmp_path), names)
    assert "state['draws'] (and 1 more) differs between ranks" in first[0][2]
    assert all("state['draws']" in tied for _, tied, _ in first), "ranks cannot join or leave in place"
    for rank, (before, _, _) in enumerate(ranks(2, run, str(tmp_path), names)):
        assert before["draws"].tolist() == [2.0 * rank] * 3
        assert before["replay"].tolist() == [float(rank)] * (2 * (1 + rank))
    for before, told, _ in ranks(3, run, str(tmp_path), names):
        assert before is None
        assert "state['draws'] (and 1 more) of each of 2 ranks" in told
    assert ranks(1, run, str(tmp_path), ("best", "log"))[0][0] is not None, "the script leaves them out"


def test_what_rank_0_alone_keeps_is_for_all_ranks(ranks: Any, tmp_path: Path) -> None:
    names = ("best", "log", "statistics")
    for size in (2, 2, 3, 1):
        found = ranks(size, run, str(tmp_path), names)
        assert not any(tied for _, tied, _ in found)
        assert not any("differs" in said for _, _, said in found)
    assert found[0][0]["best"] == 2.0
    assert len(found[0][0]["log"]) == 6


def test_a_metric_of_each_rank_is_rank_0s_elsewhere(ranks: Any, tmp_path: Path) -> None:
    assert "state['metric'] differs" in ranks(2, run, str(tmp_path), ("metric",))[0][2]
    found = ranks(2, run, str(tmp_path), ("metric",))
    assert [before["metric"] for before, _, _ in found] == [0.25, 1.25]
    found = ranks(3, run, str(tmp_path), ("metric",))
    assert [before["metric"] for before, _, _ in found] == [0.25] * 3
    assert "rank 0's counts" in found[0][2]


class Uneven(torch.optim.SGD):
    """Counts by rank: what a compression of gradients leaves on each."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                left = self.state[p].setdefault("left", torch.zeros(2))
                left += dist.get_rank()
        return super().step(closure)


def compress(directory: str) -> list[float]:
    model = network()
    optimizer = Uneven(model.parameters(), 0.05)
    job = attach(model, optimizer, adaptive=False, checkpoint_dir=directory)
    found = [float(state["left"][0]) for state in optimizer.state.values()]
    for x, y in job.loader(data(), M0):
        job.step(lambda x=x, y=y: mse_loss(job.model(x), y))
    job.close()
    return found


def test_an_optimizers_own_state_of_each_rank(ranks: Any, tmp_path: Path) -> None:
    ranks(2, compress, str(tmp_path))
    assert ranks(2, compress, str(tmp_path)) == [[0.0] * 4, [4.0] * 4]
