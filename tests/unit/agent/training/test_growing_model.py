"""The wrapper of a model that begins on one rank."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pollux.ranks.rendezvous import alone
from pollux.training.growing_model import GrowingModel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.temperature = 2.0

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        y: torch.Tensor = self.body(x) / self.temperature
        return 2 * y if twice else y

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body[0](x)
        return y


@pytest.fixture
def group() -> Iterator[None]:
    alone(torch.device("cpu"))
    yield
    dist.destroy_process_group()


def gradients(model: nn.Module, net: Net, x: torch.Tensor) -> list[torch.Tensor]:
    net.zero_grad()
    model(x, twice=True).square().mean().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def as_the_model(model: GrowingModel, net: Net) -> None:
    """Assert that a script sees in the wrapper what the model itself has."""
    assert list(model.state_dict()) == list(net.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in net.named_parameters()]
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in net.named_buffers()]
    assert list(model.parameters()) == list(net.parameters())
    assert model.temperature == 2.0
    assert model.embed(torch.zeros(1, 3)).shape == (1, 4)
    assert model.module is net
    assert not hasattr(model, "nothing")
    model.load_state_dict(net.state_dict())


def test_the_object_stays_the_same_over_growth_and_shrinking(group: None) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(5, 3)
    plain = gradients(net, net, x)
    net.body[1].eval()  # frozen statistics stay frozen
    net.body[1].train()
    model = GrowingModel(net)
    called: list[int] = []
    model.register_forward_hook(lambda *_: called.append(1))
    for spread in (False, True, True, False, True):
        if spread:
            model.spread({})
            assert "reducer" in vars(model)
        else:
            model.retire()
            assert "reducer" not in vars(model), "no second copy of the gradients"
        as_the_model(model, net)
        assert isinstance(model, DistributedDataParallel)
        assert all(map(torch.equal, gradients(model, net, x), plain))
        with model.no_sync():
            assert all(map(torch.equal, gradients(model, net, x), plain))
    assert len(called) == 10


def test_it_keeps_the_mode_of_a_model_and_of_its_parts(group: None) -> None:
    net = Net()
    net.body[1].eval()
    model = GrowingModel(net)
    model.spread({})
    assert net.training
    assert not net.body[1].training
    assert not GrowingModel(Net().eval()).training


def test_it_is_copied_and_pickled_as_its_model_is(group: None) -> None:
    model = GrowingModel(Net())
    x = torch.randn(5, 3)
    for spread in (False, True):
        if spread:
            model.spread({})
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert twin.alone is not spread
            assert list(twin.state_dict()) == list(model.state_dict())
            assert torch.equal(twin(x), model(x))
            assert twin.module is not model.module
