"""torch's internals exist, and only one module uses them.

An error names a missing internal.
"""

import ast
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pollux.errors import PolluxAgentError, UnsupportedTorch
from pollux.ranks import torch_internals
from pollux.ranks.rendezvous import leave_groups
from pollux.ranks.torch_internals import (
    abort_nccl,
    call_after_backward,
    fsdp_units,
    internal,
    loss_scale,
    norms_of,
    process_groups,
    reduces_gradients,
    rewrap,
    scaler_steps,
    scheduler_calls,
    set_group_timeout,
    skips_step,
    uncompiled,
)

AGENT = Path(torch_internals.__file__).parents[1]


def test_a_missing_internal_is_named_with_the_releases_that_have_it() -> None:
    with pytest.raises(
        UnsupportedTorch, match=r"torch\.distributed\._world\.gone.*2\.6, 2\.13, 2\.14.*install"
    ):
        internal(dist, "_world.gone")
    assert issubclass(UnsupportedTorch, PolluxAgentError)


def test_only_nccls_groups_are_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def __init__(self, backends: str) -> None:
            self.backends, self.aborted = backends, False

        def abort(self) -> None:
            self.aborted = True

    class OldGroup:
        backends = "cuda:nccl"

    groups = [Group("cuda:nccl"), Group("cpu:gloo"), Group("cpu:gloo,cuda:nccl"), OldGroup()]
    monkeypatch.setattr(torch_internals, "process_groups", lambda: dict.fromkeys(groups))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: group.backends)
    abort_nccl()
    assert [group.aborted for group in groups if isinstance(group, Group)] == [True, False, True]


def test_a_rank_leaves_nccls_groups_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: NCCL's groups end at once only if they are aborted; else each rank waits for the others."""
    group = type("Group", (), {"aborted": False, "abort": lambda self: setattr(self, "aborted", True)})()
    at_the_end: list[bool] = []
    monkeypatch.setattr(torch_internals, "process_groups", lambda: {group: None})
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: at_the_end.append(group.aborted))
    leave_groups()
    assert at_the_end == [True]


def test_a_sharded_module_of_an_older_torch_is_refused() -> None:
    class Module:
        def _get_fsdp_state(self) -> object:
            return object()

    with pytest.raises(UnsupportedTorch, match="_fsdp_param_groups"):
        next(fsdp_units(Module()))


def test_the_engine_calls_back_at_the_end_of_the_backward_pass() -> None:
    seen = []
    first, second = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    first.register_hook(lambda _: call_after_backward(lambda: seen.append((first.grad, second.grad))))
    (first * 2 + second * 3).backward()
    assert [[g.item() for g in grads] for grads in seen] == [[2.0, 3.0]]


def test_norms_of_many_tensors_at_once() -> None:
    assert norms_of([torch.ones(4), torch.ones(9).double()]).tolist() == [2.0, 3.0]


def test_a_scaler_shows_its_scale_and_each_update() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert loss_scale(scaler) is None
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler.scale(weight.sum()).backward()
    found = loss_scale(scaler)
    assert found is not None
    assert found.item() == 8.0
    before = scaler_steps(scaler)
    scaler.step(optimizer)
    assert scaler_steps(scaler) is before
    scaler.update()
    assert scaler_steps(scaler) is not before


def test_without_a_scaler_of_torch_there_is_nothing_to_see() -> None:
    assert scaler_steps(None) is None
    assert loss_scale(object()) is None


def test_calls_of_a_scheduler_are_counted() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    before = scheduler_calls(scheduler)
    optimizer.step()
    scheduler.step()
    assert scheduler_calls(scheduler) == before + 1


def test_a_step_that_amp_drops_is_seen_on_the_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    assert not skips_step(optimizer)
    optimizer.found_inf = torch.ones(1)  # type: ignore[attr-defined]
    assert skips_step(optimizer)


def test_a_compiled_model_is_seen_through() -> None:
    model = torch.nn.Linear(2, 2)
    assert uncompiled(torch.compile(model)) is model
    assert uncompiled(model) is model


def _wrapped_again() -> tuple[int, list[bool], list[float]]:
    """Rewrap a DDP model on one rank in new process groups.

    Return the number of groups, whether gradients synchronise outside and inside no_sync, and the outputs of the
    forward hook with the final gradient.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    wrapper = torch.nn.parallel.DistributedDataParallel(model)
    synchronised = [reduces_gradients(wrapper)]
    with wrapper.no_sync():
        synchronised.append(reduces_gradients(wrapper))
    seen: list[float] = []
    wrapper.register_forward_hook(lambda *_: seen.append(0.0))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group(backend="gloo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_group_timeout(timedelta(minutes=3))
    rewrap(wrapper, model, {})
    wrapper(torch.full((1, 1), 5.0)).sum().backward()
    assert model.weight.grad is not None
    return len(process_groups()), synchronised, [*seen, model.weight.grad.item()]


def test_a_wrapper_is_moved_to_new_process_groups(ranks) -> None:  # type: ignore[no-untyped-def]
    assert ranks(1, _wrapped_again) == [(2, [True, False], [0.0, 5.0])]


def _private_uses(tree: ast.AST) -> Iterator[str]:
    """Yield private names that are reached through torch, or imported from it."""
    roots = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = f"{module}.{alias.name}".lstrip(".")
                if name.split(".")[0] == "torch":
                    roots.add((alias.asname or alias.name).split(".")[0])
                    if "._" in name:
                        yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if text.split(".")[0] in roots and node.attr.startswith("_") and not node.attr.startswith("__"):
                yield text


def test_no_other_module_of_the_agent_uses_a_private_name_of_torch() -> None:
    found = {
        f"{path.relative_to(AGENT)}: {use}"
        for path in AGENT.rglob("*.py")
        if path.name != "torch_internals.py"
        for use in _private_uses(ast.parse(path.read_text()))
    }
    assert found == set()


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist\ndist.distributed_c10d._world",
        "from torch.utils.data._utils import pin_memory",
        "import torch\ntorch._foreach_norm([])",
    ],
)
def test_a_private_use_is_noticed(text: str) -> None:
    assert [*_private_uses(ast.parse(text))]
