"""Pairs of gradients measured at once by the same preconditioner.

The norms equal those of `GradientNorms.of`, which measures one parameter at a time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pollux.noise import pair_norms, precondition
from pollux.noise.pair_norms import PairNorms
from pollux.noise.precondition import GradientNorms
from pollux.noise.samples import Squares, added, summed
from tests.unit.agent.noise.used_optimizers import beyond_the_workspace, trained
from tests.unit.agent.workspace import assert_bounded

CASES = [
    (torch.optim.SGD, {}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"betas": (0.9, 0.95), "eps": 1e-3}),
    (torch.optim.RMSprop, {}),
]


def expected(norms: GradientNorms, params: list[torch.nn.Parameter]) -> torch.Tensor:
    """Sum the norms parameter by parameter, with the optimizer's own formula."""
    out = torch.zeros(norms.groups)
    for p in params:
        assert p.grad is not None
        out += norms.of([p], [p.grad])
    return out


def in_chunks(patch: pytest.MonkeyPatch, chunk: int) -> None:
    patch.setattr(pair_norms, "CHUNK", chunk)
    patch.setattr(pair_norms, "KEPT", 2 * chunk)


def total(found: Squares, norms: GradientNorms) -> torch.Tensor:
    """Return the sums for each parameter group."""
    return summed([found], norms.groups, torch.device("cpu"))[0]


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("chunk", [1 << 21, 20, 8])
def test_both_measurements(
    kind: Any, options: dict[str, Any], split: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, norms = trained(kind, split, **options)
    wanted = expected(norms, params)
    # Runs of a few parameters, of one, and parameters that are cut: 11 x 5 goes in rows.
    in_chunks(monkeypatch, chunk)
    pair = PairNorms(norms, params)
    assert torch.allclose(total(pair.first(), norms), wanted, rtol=1e-5)
    for p in params:
        assert p.grad is not None
        p.grad.mul_(0.5)
    assert torch.allclose(total(pair.second(), norms), 0.25 * wanted, rtol=1e-5)


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize(("ranks", "chunk"), [(1, 1 << 21), (2, 1 << 21), (2, 8), (3, 1 << 21), (8, 1 << 21)])
def test_the_ranks_shares_add_up(
    kind: Any, options: dict[str, Any], ranks: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, norms = trained(kind, True, **options)
    wanted = expected(norms, params)
    in_chunks(monkeypatch, chunk)
    pairs = [PairNorms(norms, params, rank=rank, ranks=ranks) for rank in range(ranks)]
    for pair in pairs:
        assert torch.allclose(total(pair.first(), norms), wanted, rtol=1e-5), "its own gradient, whole"
    parts = [total(pair.second(), norms) for pair in pairs]
    assert torch.allclose(torch.stack(parts).sum(0), wanted, rtol=1e-5)
    # The two largest parameters, 55 and 24 of 99 elements, are never with the same rank.
    assert ranks == 1 or max(float(part.sum()) for part in parts) < float(wanted.sum())


def test_no_gradients_have_no_norm() -> None:
    _, norms = trained(torch.optim.Adam, True)
    assert norms.of([], []).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_parameters_that_others_train_or_only_others_have_used(kind: Any) -> None:
    params, norms = trained(kind, False)
    alone = torch.nn.Parameter(torch.ones(3))
    alone.grad = torch.ones(3)
    pair = PairNorms(norms, [*params, alone])
    reduced, params[0].grad = params[0].grad, None
    assert torch.allclose(total(pair.first(), norms), expected(norms, params[1:]), rtol=1e-5)
    params[0].grad = reduced
    assert torch.allclose(total(pair.second(), norms), expected(norms, params), rtol=1e-5)
    fresh = GradientNorms(torch.optim.Adam(params))
    assert total(PairNorms(fresh, params).first(), fresh).count_nonzero() == 0


def laid_out(pair: PairNorms, norms: GradientNorms, steps: tuple[int, ...]) -> list[int]:
    """Measure after each number of steps; return when P was laid out."""
    laid: list[int] = []
    lay_out = pair._lay_out

    def counted() -> Any:
        laid.append(norms.steps)
        return lay_out()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair, "_lay_out", counted)
        for norms.steps in steps:
            first = total(pair.first(), norms)
            assert torch.allclose(total(pair.second(), norms), first, rtol=1e-5)
    return laid


def test_a_preconditioner_serves_until_a_hundredth_of_its_averages_is_new() -> None:
    params, norms = trained(torch.optim.Adam, False, betas=(0.9, 0.999))
    pair = PairNorms(norms, params)
    assert laid_out(pair, norms, (2000,)) == [2000], "there was none"
    assert laid_out(pair, norms, (2001,)) == [2001], "no other measurement was close to the last one"
    assert laid_out(pair, norms, (2005, 2010, 2012, 2013)) == [2012]
    params[0].grad = None
    assert laid_out(pair, norms, (2014,)) == [2014], "other parameters are used"
    assert laid_out(pair, norms, (2034, 2035)) == [2034, 2035], "measurements far apart keep no workspace"
    assert laid_out(pair, norms, (1500,)) == [1500], "an older state was restored"


@pytest.mark.parametrize(("kind", "options"), [(torch.optim.Adam, {}), (torch.optim.Adagrad, {})])
def test_a_young_preconditioner_serves_one_step(kind: Any, options: dict[str, Any]) -> None:
    params, norms = trained(kind, False, **options)
    assert laid_out(PairNorms(norms, params), norms, (98, 99, 100, 101, 102)) == [98, 99, 100, 102]


def test_samples_are_summed_by_group_whichever_parameters_had_gradients() -> None:
    found = [
        Squares(torch.tensor([2.0, 3.0]), (0, 1)),
        Squares(torch.tensor([1.0, 1.0]), (0, 1), torch.tensor([0.5, 0.0])),
        Squares(torch.tensor([4.0]), (1,)),
        added(torch.tensor([1.0, 2.0])),
    ]
    wanted = [[4.0, 9.0], [1.5, 1.0], [0.0, 16.0], [1.0, 2.0]]
    assert summed(found, 2, torch.device("cpu")).tolist() == wanted


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_the_workspace_stays_below_32_mib_however_large_the_model(kind: Any) -> None:
    params, norms = beyond_the_workspace(kind, (2500, 1000))
    pair = PairNorms(norms, params)
    assert_bounded(lambda: (pair.first(), pair.second()))


def test_a_tensor_whose_rows_are_beyond_the_workspace_is_cut_within_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    param = torch.nn.Parameter(torch.randn(2, 3, 40))
    optimizer = torch.optim.Adam([param])
    for _ in range(6):
        param.grad = grad = torch.ones_like(param)
        optimizer.step()
    norms = GradientNorms(optimizer)
    norms.steps = 6
    wanted = norms.of([param], [grad])
    monkeypatch.setattr(precondition, "CHUNK", 16)
    sizes = [sum(piece.numel() for piece in pieces) for _, pieces, _ in norms._chunks([param], [grad])]
    assert max(sizes) <= 16
    assert sum(sizes) == param.numel()
    assert torch.allclose(norms.of([param], [grad]), wanted, rtol=1e-5)
