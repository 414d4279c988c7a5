"""Ranks exchange plain values, and nothing that a peer sends is unpickled."""

from __future__ import annotations

import os
import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from pollux.errors import RankLost, StateError
from pollux.goodput import BatchLimits, NoiseScale
from pollux.ranks.control import ControlExchange
from pollux.ranks.plain_values import dumps, loads
from pollux.ranks.world import join

VALUES = [
    None,
    True,
    -3,
    1 << 80,
    0.1,
    float("-inf"),
    "text \u2603",
    b"\x00\xff",
    bytearray(b"x"),
    1 - 2j,
    [1, (2, {3}), frozenset({4})],
    {1: {"a": None}, (2, "b"): []},
    Counter("aab"),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cpu"),
    NoiseScale(1.0, 2.0),
    BatchLimits(32, 256, 1, 64),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_plain_value_comes_back(value: Any) -> None:
    found = loads(dumps(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.int64])
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 2)])
def test_a_tensor_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(6)[: int(np.prod(shape))].reshape(shape).to(dtype)
    found = loads(dumps({"t": tensor}))["t"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)


def test_numbers_of_numpy_and_a_module_s_state_come_back() -> None:
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    found = loads(dumps([array, np.float32(1.5)]))
    np.testing.assert_array_equal(found[0], array)
    assert (found[0].dtype, type(found[1]), found[1]) == (array.dtype, np.float32, 1.5)
    state = nn.BatchNorm1d(3).state_dict()
    again = loads(dumps(state))
    assert type(again) is OrderedDict
    assert again._metadata == state._metadata  # type: ignore[attr-defined]
    nn.BatchNorm1d(3).load_state_dict(again)


@pytest.mark.parametrize("value", [object(), Path("/"), [lambda: None], {"a": pytest}, np.array([object()])])
def test_an_object_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(StateError, match=r"^given.* is a .* which a checkpoint cannot hold"):
        dumps(value, "given")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"[[]]",
        b'["object", []]',
        b'["list"]',
        b'["dict", [[["list", []], 1]], null]',
        b'["OrderedDict", [], ["dict", [["clear", 1]], null]]',
        b'["record", "Path", []]',
        b'["record", "NoiseScale", [1]]',
        b'["dtype", "load"]',
        b'["dtype", "hub"]',
        b'["device", "nowhere"]',
        b'["bytes", "*"]',
        b'["tensor", ["float32", [-1], ""]]',
        b'["tensor", ["float32", [1099511627776], ""]]',
        b'["tensor", ["load", [], "AAAA"]]',
        b'["array", "O", [1], ["uint8", [8], "AAAAAAAAAAA="]]',
        b"[" * 100_000,
        b'["list", [' * 5_000 + b"]]" * 5_000,
        b"\x80\x04.",
    ],
    ids=range(21),
)
def test_what_no_rank_sends_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
        loads(text)


class Attack:
    """An object that makes a directory when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.makedirs, (self.mark, 0o700, True)


def exchange_with_an_attacker(folder: str) -> str:
    """Let rank 1 send a payload that torch's own gather of objects unpickles.

    Rank 1 sends it to this agent's gather first, then to torch's.
    """
    world = join(torch.device("cpu"))
    assert world.control is not None
    mark = f"{folder}/attacked-{world.rank}"
    attack = torch.frombuffer(bytearray(pickle.dumps(Attack(mark))), dtype=torch.uint8)
    told = ""
    if world.rank == 0:
        try:
            ControlExchange(world.control, 1).gather("hello")
        except RankLost as error:
            told = str(error)
        assert not Path(mark).exists()
    else:
        length = torch.tensor([len(attack)])
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(lengths, length, group=world.control)
        most = max(int(each) for each in lengths)
        padded = torch.zeros(most, dtype=torch.uint8)
        padded[: len(attack)] = attack
        dist.all_gather([torch.empty_like(padded) for _ in range(2)], padded, group=world.control)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, Attack(mark) if world.rank == 1 else None, group=world.control)
    return told


def test_nothing_that_a_peer_sends_is_unpickled(ranks: Any, tmp_path: Path) -> None:
    told = ranks(2, exchange_with_an_attacker, str(tmp_path))[0]
    assert "rank 1 sent a value that this agent does not send" in told
    assert (tmp_path / "attacked-1").exists(), "the attack works where pickle is trusted"
