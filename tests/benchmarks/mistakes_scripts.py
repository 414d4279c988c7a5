"""Small training scripts, each with one ordinary slip.

`loop` is the right one; the others say how they differ from it. A script returns its weights, and facts that a row of
`SLIPS` may judge.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import pollux
from pollux.data.plan import pass_order

Result = tuple[list[float], dict[str, Any]]
M0 = 16
EXAMPLES = 192
NAN = float("nan")
DEFAULT = {"POLLUX_EXCHANGE_INTERVAL": "1"}
"""The agent's own, where decisions are seldom; those of most rows come in each step."""


@dataclass(frozen=True)
class Attempt:
    """One start of a script."""

    number: int
    rank: int
    folder: Path
    """Of the checkpoints."""


@dataclass(frozen=True)
class Slip:
    """One row: a script, and what is right."""

    name: str
    script: Callable[[Attempt], Result]
    ranks: int = 1
    like: Callable[[Attempt], Result] | None = None
    """The script whose weights are right."""
    good: Callable[[Mapping[str, Any]], bool] | None = None
    """Whether the facts are right."""
    attempts: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    usual: bool = False
    """A line that every training has is an answer to it."""


def data(length: int = EXAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(length, 6, generator=generator)
    return TensorDataset(x, x @ torch.randn(6, 1, generator=generator))


def network(norm: bool = False) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16) if norm else nn.Tanh(), nn.Linear(16, 1))


def weights(model: nn.Module) -> list[float]:
    found: list[float] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return found


class Script:
    """Model, optimizer and job; passes of a step on one rank: two."""

    def __init__(
        self, model: Any = None, *, rate: float = 0.05, make: Any = None, cosine: int = 0, **options: Any
    ) -> None:
        self.model = network() if model is None else model
        make = make or (lambda parameters: torch.optim.SGD(parameters, rate, momentum=0.9))
        self.optimizer = make([p for p in self.model.parameters()])
        self.scheduler = CosineAnnealingLR(self.optimizer, cosine) if cosine else None
        self.job = pollux.attach(self.model, self.optimizer, self.scheduler, **{"adaptive": False, **options})
        self.loader: Any = None

    def load(self, most: int = 0, length: int = EXAMPLES, **options: Any) -> Any:
        most = most or M0 // 2 // self.job.world.size
        self.loader = self.job.loader(data(length), M0, per_gpu=(1, most), **options)
        return self.loader

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(self.job.model(x), y)

    def update(self) -> None:
        if self.job.sync_gradients:
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.optimizer.zero_grad()

    def train(
        self, body: Callable[[int, Tensor, Tensor], Any] | None = None, epochs: int = 2, *, most: int = 0
    ) -> Result:
        """Train; a body that returns True ends the loop over the loader."""
        loader = self.loader or self.load()
        for epoch in self.job.epochs(epochs):
            self.begin(epoch)
            for k, (x, y) in enumerate(loader):
                if (body or self.pass_)(k, x, y):
                    break
                if most and self.job.progress.optimizer_steps >= most:
                    break
            if most and self.job.progress.optimizer_steps >= most:
                break
        return self.end()

    def begin(self, epoch: int) -> None:
        """Nothing; a slip may thaw layers here."""

    def pass_(self, k: int, x: Tensor, y: Tensor) -> None:
        with self.job.micro_batch():
            self.job.backward(self.loss(x, y))
        self.update()

    def end(self, **facts: Any) -> Result:
        self.job.close()
        return weights(self.model), {"steps": self.job.progress.optimizer_steps, **facts}


def loop(_: Attempt) -> Result:
    return Script().train()


def of_body(
    body: Callable[[Script, int, Tensor, Tensor], Any], **options: Any
) -> Callable[[Attempt], Result]:
    """A script whose loop has this body."""

    def run(_: Attempt) -> Result:
        script = Script(**options)
        return script.train(lambda k, x, y: body(script, k, x, y))

    return run


# -- the order of calls ---------------------------------------------------------------------------------------


def zero_at_the_top(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    s.optimizer.zero_grad()
    with s.job.micro_batch():
        s.job.backward(s.loss(x, y))
    if s.job.sync_gradients:
        s.optimizer.step()


def model_zero_grad(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    s.model.zero_grad()
    s.pass_(k, x, y)


def step_in_every_pass(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    with s.job.micro_batch():
        s.job.backward(s.loss(x, y))
    s.optimizer.step()
    s.optimizer.zero_grad()


def weight_in_some_passes(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    with s.job.micro_batch():
        s.job.backward(s.loss(x, y), weight=len(x) if k % 2 else None)
    s.update()


def forward_outside(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    loss = s.loss(x, y)
    with s.job.micro_batch():
        s.job.backward(loss)
    s.update()


def with_closure(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    with s.job.micro_batch():
        s.job.backward(s.loss(x, y))
    if s.job.sync_gradients:
        s.optimizer.step(lambda: None)
        s.optimizer.zero_grad()


def own_backward(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    with s.job.micro_batch():
        s.loss(x, y).backward()
    s.update()


def without_contexts(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    s.loss(x, y).backward()
    s.optimizer.step()
    s.optimizer.zero_grad()


def bare_model(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    with s.job.micro_batch():
        s.job.backward(mse_loss(s.model(x), y))
    s.update()


def two_backwards(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    with s.job.micro_batch():
        out = s.job.model(x)
        s.job.backward(mse_loss(out, y), retain_graph=True)
        s.job.backward(0.5 * out.square().mean())
    s.update()


def reentrant(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    with s.job.micro_batch():
        s.job.backward(mse_loss(checkpoint(s.job.model, x.requires_grad_(), use_reentrant=True), y))
    s.update()


def step_of_a_loss(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    s.job.step(s.loss(x, y))  # type: ignore[arg-type]


def step_with_own_backward(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    def body() -> Tensor:
        loss = s.loss(x, y)
        loss.backward()
        return loss

    s.job.step(body)


def scheduler_in_every_pass(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    with s.job.micro_batch():
        s.job.backward(s.loss(x, y))
    if s.job.sync_gradients:
        s.optimizer.step()
        s.optimizer.zero_grad()
    s.scheduler.step()


def scheduler_beside_step(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    s.job.step(lambda: s.loss(x, y))
    s.scheduler.step()


def no_step(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    with s.job.micro_batch():
        s.job.backward(s.loss(x, y))


def new_optimizer(_: Attempt) -> Result:
    script = Script()

    def begin(epoch: int) -> None:
        if epoch == 1:
            script.optimizer = torch.optim.AdamW(script.model.parameters(), 1e-3)

    script.begin = begin  # type: ignore[method-assign]
    return script.train()


def nested_epochs(_: Attempt) -> Result:
    script = Script()
    script.load()
    for _ in script.job.epochs(2, statistical=True):
        script.train()
    return script.end()


def second_loop(_: Attempt) -> Result:
    script = Script()
    script.load()
    for _ in range(2):
        for _ in script.job.epochs(2, statistical=True):
            for k, (x, y) in enumerate(script.loader):
                script.pass_(k, x, y)
    return script.end()


# -- batches left out -----------------------------------------------------------------------------------------


def zero_times_nan(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    with s.job.micro_batch():
        loss = s.loss(x, y) * (NAN if k == 5 else 1.0)
        s.job.backward(loss if loss.isfinite() else 0.0 * loss)
    s.update()


def skipped(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    with s.job.micro_batch():
        loss = s.loss(x, y) * (NAN if k == 5 else 1.0)
        if loss.isfinite():
            s.job.backward(loss)
        else:
            s.job.skip()
    s.update()


def as_zero(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    with s.job.micro_batch():
        s.job.backward(s.loss(x, y) * (0.0 if k == 5 else 1.0))
    s.update()


def given_up(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    """What a step whose last pass raises should be: no step."""
    with s.job.micro_batch():
        s.job.backward(s.loss(x, y))
    if k == 5:
        s.optimizer.zero_grad()
        return
    s.update()


def continue_before(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    if k != 5:
        s.pass_(k, x, y)


def continue_inside(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    with s.job.micro_batch():
        loss = s.loss(x, y)
        if k == 5:
            return
        s.job.backward(loss)
    s.update()


def caught_exception(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    try:
        with s.job.micro_batch():
            loss = s.loss(x, y)
            if k == 5:
                raise ValueError("bad sample")
            s.job.backward(loss)
    except ValueError:
        s.optimizer.zero_grad()
        return
    s.update()


def continue_on_one(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    if k != 11 or s.job.rank == 0:
        s.pass_(k, x, y)


def step_after_nothing(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    if k != 5:
        with s.job.micro_batch():
            s.job.backward(s.loss(x, y))
    s.update()


def break_alone(rank: int, k: int) -> Callable[[Script, int, Tensor, Tensor], bool]:
    """Leave the loop after pass k, on one rank; an even one is in the middle of a step of two passes."""

    def body(s: Script, number: int, x: Tensor, y: Tensor) -> bool:
        s.pass_(number, x, y)
        return number == k and s.job.rank == rank

    return body


def one_pass(_: Attempt) -> Result:
    script = Script()
    script.load(M0)
    return script.train(lambda k, x, y: break_alone(0, 9)(script, k, x, y))


def changed_on_rank_1(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    s.pass_(k, x, y)
    if s.job.progress.optimizer_steps == 15 and s.job.rank == 1:
        nn.init.normal_(s.model[2].weight)


def always_nan(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    s.job.step(lambda: s.loss(x, y) * (NAN if k > 4 else 1.0))


# -- what is trained ------------------------------------------------------------------------------------------


def thawed(first: bool) -> Callable[[Attempt], Result]:
    def run(_: Attempt) -> Result:
        model = network()
        model[0].requires_grad_(first)
        script = Script(model)
        script.begin = lambda epoch: model[0].requires_grad_(first == (epoch == 0))  # type: ignore[method-assign]
        return script.train()

    return run


def thawed_plainly(first: bool) -> Callable[[Attempt], Result]:
    """The same by DistributedDataParallel, made again by hand."""

    def run(_: Attempt) -> Result:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", rank=rank, world_size=size)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        x, y = data().tensors
        for epoch in range(2):
            model[0].requires_grad_(first == (epoch == 0))
            wrapped = DistributedDataParallel(model)
            order = torch.from_numpy(pass_order(EXAMPLES, 0, epoch))
            for start in range(0, EXAMPLES, M0):
                for part in range(2):
                    at = start + part * M0 // 2 + rank * M0 // 2 // size
                    rows = order[at : at + M0 // 2 // size]
                    wrapped.require_backward_grad_sync = part == 1
                    (mse_loss(wrapped(x[rows]), y[rows]) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
        return weights(model), {}

    return run


def new_layer(_: Attempt) -> Result:
    script = Script()

    def begin(epoch: int) -> None:
        if epoch == 1:
            script.model[2] = nn.Linear(16, 1)

    script.begin = begin  # type: ignore[method-assign]
    return script.train()


def changed_on_one(attempt: Attempt) -> Result:
    script = Script(checkpoint_dir=attempt.folder)

    def body(k: int, x: Tensor, y: Tensor) -> None:
        script.pass_(k, x, y)
        if k == 20 and script.job.rank == 1:
            with torch.no_grad():
                script.model[2].bias += 1e-6

    return script.train(body)


def evaluation_on_rank_0(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    s.pass_(k, x, y)
    if k % 5 == 0 and s.job.rank == 0:
        s.model.eval()
        with torch.no_grad():
            s.job.model(x)
        s.model.train()


def no_evaluation(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    s.pass_(k, x, y)


def with_norm(body: Callable[[Script, int, Tensor, Tensor], Any]) -> Callable[[Attempt], Result]:
    return of_body(body, model=network(norm=True))


def names_of_the_state(_: Attempt) -> Result:
    script = Script()
    return script.end(names=list(script.job.model.state_dict()), wanted=list(script.model.state_dict()))


def contrastive(s: Script, k: int, x: Tensor, y: Tensor) -> None:
    s.job.step(lambda: torch.cat(all_gather(s.job.model(x))).var())


def contrastive_tail(_: Attempt) -> Result:
    script = Script()
    script.load(M0, length=97)
    return script.train(lambda k, x, y: contrastive(script, k, x, y))


def one_cycle(_: Attempt) -> Result:
    """A schedule of exactly the plain training's steps."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    total = 2 * EXAMPLES // M0
    scheduler = OneCycleLR(optimizer, 0.1, total_steps=total)
    job = pollux.attach(model, optimizer, scheduler, adaptive=False)
    loader = job.loader(data(), M0)
    for _ in job.epochs(2, statistical=True):
        for x, y in loader:
            with job.micro_batch():
                job.backward(mse_loss(job.model(x), y))
            if job.sync_gradients:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    job.close()
    return weights(model), {"calls": scheduler.last_epoch, "total": total}


def critic_reached(_: Attempt) -> Result:
    generator, critic = nn.Linear(6, 6), nn.Linear(6, 1)
    generating, judging = (torch.optim.SGD(m.parameters(), 0.01) for m in (generator, critic))
    job = pollux.attach(generator, generating, adaptive=False)
    other = job.add_model("critic", critic, judging)
    for x, _ in job.loader(data(), M0, per_gpu=(1, M0 // 2)):
        with other.micro_batch():
            other.backward((other.model(x) - 1).square().mean())
        with job.micro_batch():
            job.backward(-other.module(job.model(x)).mean())
        if job.sync_gradients:
            for optimizer in (judging, generating):
                optimizer.step()
                optimizer.zero_grad()
    job.close()
    return weights(generator), {}


# -- arguments ------------------------------------------------------------------------------------------------


def wrapped_already(_: Attempt) -> Result:
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    return Script(DistributedDataParallel(network())).train()


def a_data_loader(_: Attempt) -> Result:
    script = Script()
    script.loader = script.job.loader(DataLoader(data(), M0), M0)  # type: ignore[arg-type]
    return script.train()


def a_distributed_sampler(_: Attempt) -> Result:
    script = Script()
    sampler: Any = DistributedSampler(data(), num_replicas=2, rank=0)
    script.load(sampler=sampler)
    return script.train()


class OwnDivision(IterableDataset[tuple[Tensor, Tensor]]):
    """Divides itself by rank, as webdataset's split_by_node."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = data().tensors
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return iter(list(zip(x, y, strict=True))[rank::size])


def a_divided_stream(_: Attempt) -> Result:
    script = Script()
    script.loader = script.job.loader(OwnDivision(), M0, length=EXAMPLES // 2)
    return script.train()


def values_as_state(_: Attempt) -> Result:
    return Script(state={"best": object()}).train()


class Unheard(torch.optim.Optimizer):
    """Steps by the cube of its momentum."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.1)
                p.sub_(mean**3, alpha=group["lr"])


def an_unknown_optimizer(_: Attempt) -> Result:
    script = Script(make=Unheard, adaptive=True)
    script.load(max_batch_size=64)
    return script.train()


# -- a restart ------------------------------------------------------------------------------------------------


def again(**edited: Any) -> Callable[[Attempt], Result]:
    """Stop after 7 steps; the second attempt runs the edited script."""

    def run(attempt: Attempt) -> Result:
        options = {"cosine": 24, **(edited if attempt.number else {})}
        length = options.pop("length", EXAMPLES)
        compiled = options.pop("compiled", False)
        model = network(norm=False)
        if options.pop("renamed", False):
            model = nn.Sequential()
            for name, part in zip("abc", network().children(), strict=True):
                model.add_module(name, part)
        script = Script(
            torch.compile(model, backend="eager") if compiled else model,
            checkpoint_dir=attempt.folder,
            **options,
        )
        script.load(length=length)
        return script.train(most=0 if attempt.number else 7)

    return run


def loaded_after_attach(attempt: Attempt) -> Result:
    script = Script(checkpoint_dir=attempt.folder)
    script.model.load_state_dict({name: value + 0.1 for name, value in network().state_dict().items()})
    return script.train(most=0 if attempt.number else 7)


def phased(by_group: bool, stop: int = 0) -> Callable[[Attempt], Result]:
    """Thaw a layer in epoch 1 alone. `stop`: the step that the first attempt ends after."""

    def run(attempt: Attempt) -> Result:
        model = network()
        model[0].requires_grad_(False)
        chosen = model[2].parameters() if by_group else model.parameters()
        script = Script(model, make=lambda _: torch.optim.AdamW(chosen, 0.05), checkpoint_dir=attempt.folder)

        def begin(epoch: int) -> None:
            if epoch == 1:
                model[0].requires_grad_(True)
                if by_group:
                    script.optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})

        script.begin = begin  # type: ignore[method-assign]
        return script.train(epochs=3, most=0 if attempt.number else stop)

    return run


GROUPED_WHOLE, THAWED_LATER_WHOLE = phased(True), phased(False)
RESTARTED = again()
PLAIN_THAW, PLAIN_FREEZE = thawed_plainly(False), thawed_plainly(True)
ZERO, GIVEN_UP = of_body(as_zero), of_body(given_up)
NORM = with_norm(no_evaluation)

SLIPS = (
    Slip("zero_grad at the top of the loop", of_body(zero_at_the_top), like=loop),
    Slip("model.zero_grad() in every pass", of_body(model_zero_grad)),
    Slip("optimizer.step() in every pass", of_body(step_in_every_pass)),
    Slip("a weight in some passes only", of_body(weight_in_some_passes)),
    Slip("forward pass outside of the context", of_body(forward_outside), 2, loop),
    Slip("optimizer.step(closure)", of_body(with_closure), like=loop),
    Slip("loss.backward() in the context", of_body(own_backward)),
    Slip("a loop without contexts", of_body(without_contexts)),
    Slip("model(x) for job.model(x)", of_body(bare_model), 2),
    Slip("job.backward twice in a pass", of_body(two_backwards), 2),
    Slip("reentrant activation checkpointing", of_body(reentrant), 2, loop),
    Slip("job.step(loss)", of_body(step_of_a_loss)),
    Slip("loss.backward() in job.step's function", of_body(step_with_own_backward)),
    Slip("scheduler.step() in every pass", of_body(scheduler_in_every_pass, cosine=24)),
    Slip("scheduler.step() beside job.step", of_body(scheduler_beside_step, cosine=24)),
    Slip("no optimizer.step()", of_body(no_step)),
    Slip("a new optimizer in mid-training", new_optimizer),
    Slip("nested loops over epochs", nested_epochs),
    Slip("a second loop over epochs", second_loop, usual=True),
    Slip("0.0 * loss where the loss is NaN", of_body(zero_times_nan)),
    Slip("job.skip() where the loss is NaN", of_body(skipped), 2, ZERO),
    Slip("continue before a step's last pass", of_body(continue_before), like=GIVEN_UP),
    Slip("continue in a step's last pass", of_body(continue_inside), like=GIVEN_UP),
    Slip("an exception caught in a step's last pass", of_body(caught_exception), like=GIVEN_UP),
    Slip("continue on one rank", of_body(continue_on_one), 2),
    Slip("a step after a pass left out on all ranks", of_body(step_after_nothing), 2),
    Slip("break on rank 0 alone", of_body(break_alone(0, 19)), 2, environment=DEFAULT),
    Slip("break on rank 1 alone", of_body(break_alone(1, 19)), 2, environment=DEFAULT),
    Slip(
        "break on rank 0 alone in the middle of a step", of_body(break_alone(0, 18)), 2, environment=DEFAULT
    ),
    Slip("break on rank 0 alone, one pass a step", one_pass, 2, environment=DEFAULT),
    Slip("the same, a decision in each step", one_pass, 2),
    Slip("a layer made again on rank 1 alone", of_body(changed_on_rank_1), 2, environment=DEFAULT),
    Slip("a loss that is NaN", of_body(always_nan)),
    Slip("layers thawed in epoch 1", thawed(False), 2, PLAIN_THAW),
    Slip("layers frozen in epoch 1", thawed(True), 2, PLAIN_FREEZE),
    Slip("a layer replaced in epoch 1", new_layer, 2),
    Slip(
        "a parameter changed on one rank", changed_on_one, 2, environment={"POLLUX_CHECKPOINT_INTERVAL": "0"}
    ),
    Slip("evaluation by job.model on rank 0", with_norm(evaluation_on_rank_0), 2, NORM),
    Slip(
        "job.model.state_dict()", names_of_the_state, 2, good=lambda facts: facts["names"] == facts["wanted"]
    ),
    Slip("a contrastive loss, unequal parts", contrastive_tail, 3),
    Slip("OneCycleLR on 3 ranks", one_cycle, 3, good=lambda facts: 0 < facts["calls"] <= facts["total"]),
    Slip("a generator's loss reaches the critic", critic_reached),
    Slip("a model in DistributedDataParallel", wrapped_already, 2),
    Slip("a DataLoader", a_data_loader),
    Slip("a DistributedSampler", a_distributed_sampler),
    Slip("a stream that divides itself", a_divided_stream, 2),
    Slip("an object without state_dict as state", values_as_state),
    Slip("an optimizer that the agent does not know", an_unknown_optimizer),
    Slip("learning rate edited", again(rate=0.1), attempts=2),
    Slip("length of the schedule edited", again(cosine=48), attempts=2),
    Slip("torch.compile switched on", again(compiled=True), like=RESTARTED, attempts=2),
    Slip("a parameter renamed", again(renamed=True), attempts=2),
    Slip("another optimizer", again(make=lambda p: torch.optim.AdamW(p, 0.05)), attempts=2),
    Slip("the data grew", again(length=EXAMPLES + 16), attempts=2),
    Slip("weights loaded after attach", loaded_after_attach, attempts=2),
    Slip("add_param_group, then a restart", phased(True, 29), like=GROUPED_WHOLE, attempts=2),
    Slip("add_param_group, a restart in its epoch", phased(True, 17), like=GROUPED_WHOLE, attempts=2),
    Slip("layers thawed, then a restart", phased(False, 29), like=THAWED_LATER_WHOLE, attempts=2),
)
