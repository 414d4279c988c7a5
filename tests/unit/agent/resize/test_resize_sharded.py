"""Resizes in place of a model under fully_shard, on real ranks over gloo."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.optim import Adam

from pollux.errors import LEFT_STATUS, RankLost
from pollux.ranks.resharding import MovingShards, obstacle_to_resharding
from pollux.ranks.sharding import ShardedOptimizer
from pollux.resize.capability import obstacle_in_place
from tests.unit.agent.regression import EXAMPLES
from tests.unit.agent.resizing import Stage, Training, follow, order, retrace

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="fully_shard is supported from torch 2.13 on"
)


class Average:
    """A moving average of parameters, of DTensors where they are."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.values = [p.detach().clone() for p in parameters]

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for value, saved in zip(self.values, state["values"], strict=True):
            value.copy_(saved)


class Plain(Training):
    """A training whose gradients are clipped by their norm, with a moving average of its weights."""

    def own_state(self) -> Any:
        self.average = Average(self.parameters)
        return {"average": self.average}

    def state(self) -> dict[str, Any]:
        average = torch.cat([self.whole(value).flatten() for value in self.average.values])
        return super().state() | {"average": average}

    def make(self) -> nn.Module:
        """Seven rows on four ranks, or one row: some shards are short or empty."""
        return nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 1))

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, 0.5)
        self.optimizer.step()
        with torch.no_grad():
            for value, p in zip(self.average.values, self.parameters, strict=True):
                value.lerp_(p.detach(), 0.1)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.network.parameters())


class Sharded(Plain):
    """The same under fully_shard, as a script writes it."""

    left = False

    def __init__(self, directory: Path) -> None:
        self.kept: list[bool] = []
        """For each resize, whether parameters and moments were the same to the last bit."""
        super().__init__(directory)
        self.held = self.parameters  # as a script may hold them
        coordinator = self.job.coordinator
        resize, begin_loop = coordinator.resize, coordinator.begin_loop

        def compared(move: int) -> None:
            before = self.everything()
            try:
                resize(move)
            except SystemExit:
                self.left = True
                raise
            self.kept.append(all(map(torch.equal, before, self.everything())))

        def begun() -> None:
            comes = self.job.world.waiting
            begin_loop()
            if comes:
                self.everything()  # the other ranks compare

        coordinator.resize, coordinator.begin_loop = compared, begun  # type: ignore[method-assign]

    def make(self) -> nn.Module:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        network = super().make()
        for layer in network.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        return fully_shard(network)

    def everything(self) -> list[Tensor]:
        moments = sorted(ShardedOptimizer(self.optimizer).shards().items())
        return [self.whole(t) for t in (*self.held, *(value for _, value in moments), *self.average.values)]

    def whole(self, tensor: Any) -> Tensor:
        if not hasattr(tensor, "full_tensor"):
            return super().whole(tensor)
        with torch.no_grad():
            found: Tensor = tensor.to_local() if self.left else tensor.full_tensor()
        return found.detach().clone()

    def state(self) -> dict[str, Any]:
        return super().state() | {"kept": self.kept, "obstacle": obstacle_in_place(self.job.training)}


def move(directory: Path, orders: list[dict[str, Any]]) -> dict[str, Any]:
    return follow(directory, orders, len(orders), Sharded(directory))


def restart(directory: Path, until: int) -> dict[str, Any]:
    return retrace(directory, until, Sharded)


def train_plainly(directory: Path, until: int) -> dict[str, Any]:
    return retrace(directory, until, Plain)


def test_shards_move_to_the_ranks_that_are_there(stage: Stage, tmp_path: Path) -> None:
    """Resize 2 -> 4 -> 3 -> 1 -> 2 ranks in living processes.

    The reference is the same training on one rank without fully_shard.
    """
    orders = [
        order(11, "n1 n2 n3 n4", "grow"),
        order(12, "n1 n2 n3", "shrink"),
        order(13, "n1", "shrink"),
        order(14, "n1 n6", "grow"),
    ]
    stage.start(["n1", "n2"], move, tmp_path, orders)
    found = stage.results(["n3", "n4", "n6"], move, tmp_path, orders)
    assert {node: rank["code"] for node, rank in found.items()} == {
        **{"n1": None, "n6": None},
        **dict.fromkeys(["n2", "n3", "n4"], LEFT_STATUS),
    }
    first = found["n1"]
    assert [size for _, size in first["worlds"]] == [2, 4, 3, 1, 2]
    assert first["state"]["kept"] == [True] * 4, "parameters and moments stay the same to the last bit"
    assert first["state"]["obstacle"] is None, "the agent would do so by itself"
    assert "resize_refused" not in first["report"]
    assert (first["report"]["resized"], first["report"]["gpus"]) == (14, 2)
    for part in ("weights", "moments", "average"):
        assert torch.equal(first["state"][part], found["n6"]["state"][part])

    counts = Counter(sample for rank in found.values() for sample in rank["used"])
    passes = max(number for number, _ in counts)
    assert passes >= 1
    assert max(counts.values()) == 1
    assert all((number, i) in counts for number in range(passes) for i in range(EXAMPLES))

    plain = Stage(tmp_path / "plain", stage.free_port)
    plain.start(["n1"], train_plainly, tmp_path / "plain", first["state"]["steps"])
    expected = plain.results([])["n1"]["state"]
    for part in ("weights", "moments", "average"):
        torch.testing.assert_close(first["state"][part], expected[part], rtol=1e-3, atol=1e-5)


def lose(directory: Path, orders: list[dict[str, Any]]) -> dict[str, Any]:
    """Lose n2 while its shards move in the second resize."""
    training = Sharded(directory)
    send, sends = MovingShards.send, 0

    def die(self: MovingShards, *args: Any) -> None:
        nonlocal sends
        sends += 1
        if sends == 2 and os.environ["SLURMD_NODENAME"] == "n2":
            os._exit(9)
        send(self, *args)

    MovingShards.send = die  # type: ignore[method-assign]
    try:
        return follow(directory, orders, 99, training)
    except RankLost as error:
        return {
            "error": str(error),
            "worlds": training.worlds,
            "steps": training.job.progress.optimizer_steps,
        }


@pytest.mark.slow
def test_a_rank_that_dies_while_shards_move_costs_the_steps_since_the_checkpoint(
    stage: Stage, tmp_path: Path
) -> None:
    orders = [order(71, "n1 n2 n3", "grow"), order(72, "n1 n2", "shrink")]
    stage.start(["n1", "n2"], lose, tmp_path, orders)
    found = stage.results(["n3"], lose, tmp_path, orders)
    assert found["n2"] == "died"
    assert [size for _, size in found["n1"]["worlds"]] == [2, 3]
    # The newest checkpoint is of three ranks, and was written for this move while they trained on.
    again = Stage(tmp_path, stage.free_port)
    last = found["n1"]["steps"] + 3
    again.start(["n1"], restart, tmp_path, last)
    restarted = again.results([])["n1"]
    assert found["n1"]["worlds"][1][0] < restarted["from"] <= found["n1"]["steps"]
    plain = Stage(tmp_path / "plain", stage.free_port)
    plain.start(["n1"], train_plainly, tmp_path / "plain", last)
    expected = plain.results([])["n1"]["state"]
    torch.testing.assert_close(restarted["state"]["weights"], expected["weights"], rtol=1e-3, atol=1e-5)


def obstacles() -> dict[str, str | None]:
    dist.init_process_group("gloo")

    def why(
        change: Callable[[nn.Module, Adam], object] = lambda *_: None,
        state: Callable[[nn.Module], Any] = lambda _: None,
        **options: Any,
    ) -> str | None:
        model = fully_shard(nn.Linear(4, 4), **options)
        optimizer = Adam(model.parameters(), lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        change(model, optimizer)
        return obstacle_to_resharding(model, optimizer, state(model))

    def keep(model: nn.Module, optimizer: Adam) -> None:
        optimizer.state[next(model.parameters())]["rows"] = torch.zeros(4)

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("copies", "shards"))
    return {
        "none": why(),
        "copies": why(mesh=mesh),
        "axis": why(shard_placement_fn=lambda p: Shard(p.ndim - 1)),
        "compiled": why(lambda model, _: model.compile(backend="eager")),
        "state": why(keep),
        "average": why(state=lambda model: Average(list(model.parameters()))),
        "copied average": why(state=lambda _: fully_shard(nn.Linear(4, 4))),
        "divisor": why(lambda model, _: model.set_gradient_divide_factor(2.0)),  # type: ignore[operator]
    }


def test_other_shards_stay_where_they_are(ranks: Any) -> None:
    found = ranks(1, obstacles)[0]
    expected = {
        "copies": "more than one dimension",
        "axis": "other axes than the first",
        "compiled": "compiled",
        "state": "'rows' is not sharded",
        "copied average": "copies of its shards",
    }
    assert {name for name, why in found.items() if why is None} == {"none", "divisor", "average"}
    for name, why in expected.items():
        assert why in found[name]
