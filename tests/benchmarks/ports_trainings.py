"""Ten small trainings in the shape of public scripts, each plain and ported. See `ports.py`.

`plain()` is the script as it was, on one process. `port(attempt)` is the same with the agent; attempt 0 kills each of
its ranks in the middle. Both return the numbers that must be equal: weights, or metrics where the row says so.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, PolynomialLR, SequentialLR
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import pollux
from pollux.data.plan import pass_order
from tests.benchmarks.mistakes_scripts import Attempt, Result, data, network, weights

M0 = 12
LENGTH = 192
STEPS = LENGTH // M0
"""Of an epoch."""


@dataclass(frozen=True)
class Port:
    """One row: a training, plain and ported."""

    name: str
    compares: str
    plain: Callable[[], list[float]]
    port: Callable[[Attempt], Result]
    tolerance: float = 1e-4


def order(epoch: int, length: int = LENGTH) -> Iterator[Tensor]:
    """The batches of a pass, in the agent's order."""
    yield from torch.from_numpy(pass_order(length, 0, epoch)).split(M0)


def batches(rows: Any, epoch: int) -> Iterator[tuple[Tensor, ...]]:
    for numbers in order(epoch, len(rows)):
        yield tuple(torch.stack(part) for part in zip(*[rows[i] for i in numbers.tolist()], strict=True))


class Ported:
    """The agent's part of a port: attach, the step that it began with, and the kill."""

    def __init__(self, attempt: Attempt, *arguments: Any, **options: Any) -> None:
        self.attempt = attempt
        self.job = pollux.attach(*arguments, adaptive=False, checkpoint_dir=attempt.folder, **options)
        self.began = self.job.progress.optimizer_steps

    def kill_at(self, step: int) -> None:
        """Kill this rank, in attempt 0: all of them do so after the same step."""
        if self.attempt.number == 0 and self.job.progress.optimizer_steps == step:
            time.sleep(0.5)  # for the newest checkpoint to reach the disk
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self, found: list[float]) -> Result:
        self.job.close()
        return found, {"began": self.began}


def sgd(model: nn.Module, rate: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate, momentum=0.9)


def loss_of(model: nn.Module, rows: Any) -> float:
    x, y = (torch.stack(part) for part in zip(*[rows[i] for i in range(len(rows))], strict=True))
    with torch.no_grad():
        return float(mse_loss(model(x), y))


# -- folds of a cross-validation ---------------------------------------------------------------------------------


def fold(number: int) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    held = set(range(number * 64, number * 64 + 64))
    rows = data(LENGTH)
    return model, Subset(rows, [i for i in range(LENGTH) if i not in held]), Subset(rows, sorted(held))


def folds_plain() -> list[float]:
    found = []
    for number in range(3):
        model, rows, held = fold(number)
        optimizer = sgd(model)
        for epoch in range(3):
            for numbers in order(epoch, len(rows)):
                x, y = (torch.stack(p) for p in zip(*[rows[i] for i in numbers.tolist()], strict=True))
                mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        found.append(loss_of(model, held))
    return found


def folds_port(attempt: Attempt) -> Result:
    found, began = [], []
    for number in range(3):
        model, rows, held = fold(number)
        ported = Ported(attempt, model, sgd(model), name=f"fold-{number}")
        job, loader = ported.job, ported.job.loader(rows, M0)
        for _ in job.epochs(3):
            for x, y in loader:
                job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc] # noqa: B023
                if number == 1:
                    ported.kill_at(20)
        found.append(loss_of(job.module, held))
        began.append(ported.began)
        job.close()
    return found, {"began": began[1]}


# -- two phases: the head, then all layers, with another optimizer and other data ---------------------------------


def phases_plain() -> list[float]:
    model = network()
    for phase in range(2):
        model[0].requires_grad_(phase == 1)
        optimizer = sgd(model) if phase == 0 else torch.optim.AdamW(model.parameters(), 0.01)
        rows = data(LENGTH) if phase == 0 else Subset(data(LENGTH), range(96))
        for epoch in range(2):
            for x, y in batches(rows, epoch):
                mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
    return weights(model)


def phases_port(attempt: Attempt) -> Result:
    model = network()
    began = 0
    for phase in range(2):
        model[0].requires_grad_(phase == 1)
        optimizer = sgd(model) if phase == 0 else torch.optim.AdamW(model.parameters(), 0.01)
        ported = Ported(attempt, model, optimizer)
        job, began = ported.job, ported.began
        loader = job.loader(data(LENGTH) if phase == 0 else Subset(data(LENGTH), range(96)), M0)
        for _ in job.epochs(2):
            for x, y in loader:
                job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc] # noqa: B023
                if phase == 1:
                    ported.kill_at(9)
        job.close()
    return weights(model), {"began": began}


# -- a stream of shards, in webdataset's shape ---------------------------------------------------------------------


class Shards(IterableDataset[dict[str, Any]]):
    """Shuffles its shards, and the samples in a buffer, by the pass alone."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        chance = random.Random(self.epoch)
        held: list[dict[str, Any]] = []
        x, y = data(LENGTH).tensors
        for shard in chance.sample(range(8), 8):
            for i in range(shard * 24, shard * 24 + 24):
                held.append({"__key__": f"{i:06}", "x": x[i], "y": y[i]})
                if len(held) > 40:
                    yield held.pop(chance.randrange(len(held)))
        yield from chance.sample(held, len(held))


def stream_plain() -> list[float]:
    model, shards = network(), Shards()
    optimizer = sgd(model)
    scheduler = CosineAnnealingLR(optimizer, 3 * STEPS)
    for epoch in range(3):
        shards.set_epoch(epoch)
        samples = list(shards)
        for start in range(0, LENGTH, M0):
            x, y = (torch.stack([s[name] for s in samples[start : start + M0]]) for name in "xy")
            mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return weights(model)


def stream_port(attempt: Attempt) -> Result:
    model = network()
    optimizer = sgd(model)
    ported = Ported(attempt, model, optimizer, CosineAnnealingLR(optimizer, 3 * STEPS))
    job = ported.job
    loader = job.loader(Shards(), M0, length=LENGTH)
    for _ in job.epochs(3):
        for batch in loader:
            job.step(lambda batch=batch: mse_loss(job.model(batch["x"]), batch["y"]))  # type: ignore[misc]
            ported.kill_at(22)
    return ported.end(weights(model))


# -- a word-level language model: LSTM, tied weights, clipping, a rate divided by 4 without improvement ------------


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 12)
        self.lstm = nn.LSTM(12, 12, batch_first=True)
        self.out = nn.Linear(12, 20)
        self.out.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(words))
        out: Tensor = self.out(hidden)
        return out


def text() -> tuple[TensorDataset, Tensor]:
    """Windows of nine words of a text in which each word follows from the one before; further ones for validation."""
    chance = random.Random(5)
    words = [0]
    while len(words) < (LENGTH + 24) * 9:
        words.append((words[-1] * 7 + chance.choice((1, 1, 1, 4))) % 20)
    windows = torch.tensor(words).reshape(-1, 9)
    return TensorDataset(windows[:LENGTH]), windows[LENGTH:]


def words_loss(model: nn.Module, windows: Tensor) -> Tensor:
    return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def anneal(optimizer: torch.optim.Optimizer, kept: dict[str, Any], value: float) -> None:
    """As the script of torch's examples does it; the margin makes rounding decide nothing."""
    kept["curve"] = [*kept["curve"], value]
    if value > kept["best"] - 0.02:
        optimizer.param_groups[0]["lr"] /= 4
    kept["best"] = min(kept["best"], value)


def words_plain() -> list[float]:
    model = Words()
    (train,), held = text()[0].tensors, text()[1]
    optimizer = torch.optim.SGD(model.parameters(), 2.0)
    kept: dict[str, Any] = {"best": 1e9, "curve": []}
    for epoch in range(4):
        for numbers in order(epoch):
            words_loss(model, train[numbers]).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            anneal(optimizer, kept, float(words_loss(model, held)))
    return kept["curve"] + weights(model)


def words_port(attempt: Attempt) -> Result:
    model = Words()
    train, held = text()
    optimizer = torch.optim.SGD(model.parameters(), 2.0)
    kept: dict[str, Any] = {"best": 1e9, "curve": []}
    ported = Ported(attempt, model, optimizer, state=kept)
    job = ported.job
    loader = job.loader(train, M0)
    for _ in job.epochs(4):
        for (windows,) in loader:
            job.step(lambda windows=windows: words_loss(job.model, windows), clip=0.25)  # type: ignore[misc]
            ported.kill_at(40)
        with torch.no_grad():
            anneal(optimizer, kept, float(words_loss(job.module, held)))
    return ported.end(kept["curve"] + weights(model))


# -- PPO: data that the loop makes -----------------------------------------------------------------------------------


class Rollout(Dataset[tuple[Tensor, ...]]):
    """The newest rollout; it is in `state=`, so that a restart goes on with it."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {"made": -1, "rows": torch.zeros(96, 7)}

    def __len__(self) -> int:
        return 96

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        row = self.kept["rows"][i]
        return row[:4], row[4], row[5], row[6]

    def make(self, policy: nn.Module, iteration: int) -> None:
        if self.kept["made"] == iteration:
            return
        generator = torch.Generator().manual_seed(iteration)
        seen = torch.randn(96, 4, generator=generator)
        with torch.no_grad():
            mean = policy(seen)[:, 0]
        act = mean + 0.5 * torch.randn(96, generator=generator)
        reward = -((act - seen.sum(1) / 2) ** 2)
        gain = (reward - reward.mean()) / reward.std()
        rows = torch.cat([seen, torch.stack([act, (-((act - mean) ** 2) / 0.5), gain], 1)], 1)
        self.kept.update(made=iteration, rows=rows)


def policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def clipped(model: nn.Module, batch: Any) -> Tensor:
    seen, act, before, gain = batch
    ratio = torch.exp(-((act - model(seen)[:, 0]) ** 2) / 0.5 - before)
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def ppo_plain() -> list[float]:
    model, rollout = policy(), Rollout()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for epoch in range(8):
        rollout.make(model, epoch // 2)
        for batch in batches(rollout, epoch):
            clipped(model, batch).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def ppo_port(attempt: Attempt) -> Result:
    model, rollout = policy(), Rollout()
    ported = Ported(attempt, model, torch.optim.Adam(model.parameters(), 0.01), state=rollout.kept)
    job = ported.job
    loader = job.loader(rollout, M0)
    for epoch in job.epochs(8):
        rollout.make(job.module, epoch // 2)
        for batch in loader:
            job.step(lambda batch=batch: clipped(job.model, batch), clip=0.5)  # type: ignore[misc]
            ported.kill_at(29)
    return ported.end(weights(model))


# -- segmentation: two heads, rates of their own, a warm-up, pixels that do not count --------------------------------


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Conv2d(1, 8, 3, padding=1)
        self.head, self.aux = nn.Conv2d(8, 3, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.body(x))
        return self.head(hidden), self.aux(hidden)


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(LENGTH, 1, 6, 6, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
    y[torch.rand(LENGTH, 6, 6, generator=generator) < 0.3 * torch.rand(LENGTH, 1, 1, generator=generator)] = (
        255
    )
    return TensorDataset(x, y)


def pixel_parts(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    groups = [{"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": 0.2}]  # type: ignore[union-attr]
    groups.append({"params": model.aux.parameters(), "lr": 0.2})  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(groups, 0.1, momentum=0.9, weight_decay=1e-4)
    parts = [LinearLR(optimizer, 0.1, 1.0, 5), PolynomialLR(optimizer, 2 * STEPS - 5, 0.9)]
    return optimizer, SequentialLR(optimizer, parts, [5])


def pixel_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The sum over the pixels that count."""
    out, aux = model(x)
    each = [cross_entropy(part, y, ignore_index=255, reduction="sum") for part in (out, aux)]
    return each[0] + 0.5 * each[1]


def segmentation_plain() -> list[float]:
    model = Pixels()
    optimizer, scheduler = pixel_parts(model)
    for epoch in range(2):
        for x, y in batches(images(), epoch):
            (pixel_loss(model, x, y) / (y != 255).sum()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return weights(model)


def segmentation_port(attempt: Attempt) -> Result:
    model = Pixels()
    optimizer, scheduler = pixel_parts(model)
    ported = Ported(attempt, model, optimizer, scheduler)
    job = ported.job
    loader = job.loader(images(), M0)
    for _ in job.epochs(2):
        for x, y in loader:
            job.step(lambda x=x, y=y: pixel_loss(job.model, x, y), weight=(y != 255).sum())  # type: ignore[misc]
            ported.kill_at(13)
    return ported.end(weights(model))


# -- LoRA: a frozen model, and small matrices beside it --------------------------------------------------------------


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.a.T @ self.b.T
        return out


def adapted() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    model[0], model[2] = LowRank(model[0]), LowRank(model[2])
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)


def lora_plain() -> list[float]:
    model, optimizer = adapted()
    for epoch in range(2):
        for x, y in batches(data(LENGTH), epoch):
            mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def lora_port(attempt: Attempt) -> Result:
    model, optimizer = adapted()
    ported = Ported(attempt, model, optimizer)
    job = ported.job
    loader = job.loader(data(LENGTH), M0)
    for _ in job.epochs(2):
        for x, y in loader:
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
            ported.kill_at(21)
    return ported.end(weights(model))


# -- contrastive: negatives are the samples of all ranks -------------------------------------------------------------


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))


def near(own: Tensor, others: Tensor, first: int) -> Tensor:
    """InfoNCE of a rank's pairs against those of all."""
    return cross_entropy(own @ others.T / 0.2, torch.arange(first, first + len(own)))


def contrastive_plain() -> list[float]:
    model = encoder()
    optimizer = sgd(model)
    for epoch in range(2):
        for x, _ in batches(data(LENGTH), epoch):
            near(normalize(model(x)), normalize(model(1.1 * x)), 0).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def contrastive_port(attempt: Attempt) -> Result:
    model = encoder()
    ported = Ported(attempt, model, sgd(model))
    job = ported.job
    loader = job.loader(data(LENGTH), M0, equal_parts=True)

    def loss(x: Tensor) -> Tensor:
        own, other = normalize(job.model(torch.cat([x, 1.1 * x]))).chunk(2)
        if job.world.size == 1:
            return near(own, other, 0)
        return near(own, torch.cat(all_gather(other.contiguous())), job.rank * len(x))

    for _ in job.epochs(2):
        for x, _ in loader:
            job.step(lambda x=x: loss(x))  # type: ignore[misc]
            ported.kill_at(19)
    return ported.end(weights(model))


# -- GAN --------------------------------------------------------------------------------------------------------------


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    # The critic's last bias would have a gradient of rounding alone, and Adam makes whole steps of it.
    return nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1, bias=False))


def gan_plain() -> list[float]:
    generator, critic = pair()
    making, judging = (
        torch.optim.Adam(generator.parameters(), 0.01),
        torch.optim.Adam(critic.parameters(), 0.01),
    )
    for epoch in range(2):
        for x, _ in batches(data(LENGTH), epoch):
            fake = generator(x.flip(1))
            (critic(fake.detach()) - critic(x + 2)).mean().backward()
            judging.step()
            judging.zero_grad()
            critic.requires_grad_(False)
            (-critic(fake).mean()).backward()
            critic.requires_grad_(True)
            making.step()
            making.zero_grad()
    return weights(generator) + weights(critic)


def gan_port(attempt: Attempt) -> Result:
    generator, judge = pair()
    ported = Ported(attempt, generator, torch.optim.Adam(generator.parameters(), 0.01))
    job = ported.job
    critic = job.add_model("critic", judge, torch.optim.Adam(judge.parameters(), 0.01))
    for _ in (loader := job.loader(data(LENGTH), M0)) and job.epochs(2):
        for x, _ in loader:
            with torch.no_grad():
                fake = generator(x.flip(1))
            with critic.micro_batch():
                out = critic.model(torch.cat([fake, x + 2])).chunk(2)
                critic.backward((out[0] - out[1]).mean())
            if job.sync_gradients:
                critic.optimizer.step()
                critic.optimizer.zero_grad()
            judge.requires_grad_(False)
            with job.micro_batch():
                job.backward(-critic.module(job.model(x.flip(1))).mean())
            judge.requires_grad_(True)
            if job.sync_gradients:
                job.optimizer.step()
                job.optimizer.zero_grad()
            ported.kill_at(14)
    return ported.end(weights(generator) + weights(judge))


# -- two optimizers of one model --------------------------------------------------------------------------------------


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, 0.02), torch.optim.AdamW(rest, 0.01)]


def two_plain() -> list[float]:
    model = network()
    optimizers = two(model)
    schedules = [CosineAnnealingLR(each, 2 * STEPS) for each in optimizers]
    for epoch in range(2):
        for x, y in batches(data(LENGTH), epoch):
            mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            for optimizer, scheduler in zip(optimizers, schedules, strict=True):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return weights(model)


def two_port(attempt: Attempt) -> Result:
    model = network()
    optimizers = two(model)
    ported = Ported(attempt, model, optimizers, [CosineAnnealingLR(each, 2 * STEPS) for each in optimizers])
    job = ported.job
    loader = job.loader(data(LENGTH), M0)
    for _ in job.epochs(2):
        for x, y in loader:
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
            ported.kill_at(18)
    return ported.end(weights(model))


PORTS = (
    Port("folds of a cross-validation", "validation loss of each fold", folds_plain, folds_port),
    Port("two phases: head, then all", "weights", phases_plain, phases_port),
    Port("a stream of shards (webdataset)", "weights", stream_plain, stream_port),
    Port("word-level language model", "validation losses, weights", words_plain, words_port, 1e-3),
    Port("PPO", "weights", ppo_plain, ppo_port, 1e-3),
    Port("segmentation", "weights", segmentation_plain, segmentation_port),
    Port("LoRA", "weights", lora_plain, lora_port),
    Port("contrastive", "weights", contrastive_plain, contrastive_port),
    Port("GAN", "weights of both", gan_plain, gan_port),
    Port("two optimizers (Muon, AdamW)", "weights", two_plain, two_port),
)
