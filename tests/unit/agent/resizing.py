"""A training on forked ranks that resizes in place."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR

from pollux import Job, attach
from pollux.errors import CheckpointError
from pollux.resize import companion_job
from pollux.resize.companion_job import RecruitmentFailed
from pollux.slurm_job.environment import LENT_RANKS
from tests.unit.agent.answering import Line
from tests.unit.agent.regression import data

PATIENCE = 100.0


class Stage:
    """Ranks as forked processes: a test's own, and those of companions."""

    def __init__(self, directory: Path, free_port: Callable[[], int]) -> None:
        self.directory, self.free_port, self._port = directory, free_port, str(free_port())
        self._context = multiprocessing.get_context("fork")
        self._running: list[tuple[str, Any, Any]] = []
        self.companions: set[Path] = set()
        self.environment: dict[str, str] = {}
        """Of all ranks, beside what says their place."""

    def start(self, nodes: list[str], body: Callable[..., Any], *args: Any) -> None:
        """Fork one rank for each node name."""
        for rank, node in enumerate(nodes):
            place = {"RANK": str(rank), "WORLD_SIZE": str(len(nodes)), "MASTER_PORT": self._port}
            self._fork(node, place, body, args)

    def _fork(self, node: str, place: dict[str, str], body: Callable[..., Any], args: Any) -> None:
        fixed = {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "SLURMD_NODENAME": node,
        }
        here, there = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_rank, args=(body, args, fixed | place | self.environment, there)
        )
        process.start()
        there.close()
        self._running.append((node, process, here))

    def _bring_companions(self, names: list[str], body: Callable[..., Any], args: Any) -> None:
        for path in self.directory.glob("companion-*.json"):
            try:
                told = json.loads(path.read_text())
            except (OSError, ValueError):
                continue  # half written, or taken away again
            if path in self.companions:
                continue
            self.companions.add(path)
            ranks = told["size"] - told["first"]
            companion = {"WORLD_SIZE": str(ranks), "MASTER_PORT": str(self.free_port())}
            for index in range(ranks if names else 0):
                place = {"RANK": str(index), "GROUP_RANK": str(index), **companion}
                self._fork(names.pop(0), place | {"POLLUX_COMPANION": str(path)}, body, args)

    def results(self, names: list[str], body: Callable[..., Any] | None = None, *args: Any) -> dict[str, Any]:
        """Return every rank's result, by node.

        Start a companion on the next node of `names` when the agent asks for one.
        """
        end = time.monotonic() + PATIENCE
        found: dict[str, Any] = {}
        troubles: list[str] = []
        try:
            while len(found) < len(self._running):
                if troubles and time.monotonic() >= end:
                    break
                assert time.monotonic() < end, f"silent: {[n for n, *_ in self._running if n not in found]}"
                if body is not None:
                    self._bring_companions(names, body, args)
                for node, _, pipe in self._running:
                    if node in found or not pipe.poll(0.01):
                        continue
                    try:
                        good, found[node] = pickle.loads(pipe.recv_bytes())
                    except EOFError:
                        good, found[node] = True, "died"
                    if not good:
                        troubles.append(f"{node}: {found[node]}")
                        # The others' troubles come of this one, or say more.
                        end = min(end, time.monotonic() + 5)
            assert not troubles, "\n".join(troubles)
        finally:
            for _, process, _ in self._running:
                if len(found) < len(self._running):
                    process.kill()
                process.join(10)
        return found


def _rank(body: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str], pipe: Any) -> None:
    os.environ.update(env)
    torch.set_num_threads(1)
    atexit._clear()  # pytest's own
    try:
        pipe.send_bytes(pickle.dumps((True, body(*args))))
    except SystemExit as left:
        pipe.send_bytes(pickle.dumps((True, {"code": left.code})))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    pipe.close()
    atexit._run_exitfuncs()
    os._exit(0)  # no interpreter shutdown: pytest's own exit handlers are not this process's


def order(number: int, nodes: str, kind: str, path: str = "resize", **more: str) -> dict[str, Any]:
    return {"id": number, "path": path, "kind": kind, "nodes": nodes.split(), "gpus_per_node": 1, **more}


class Training:
    """A training with every kind of state that a script can have."""

    batch, per_gpu = 24, (1, 12)

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(0)
        self.network = self.make()
        if "COMPILED" in os.environ:
            self.network.compile(backend="eager")
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=0.01)
        self.scheduler = LambdaLR(self.optimizer, lambda n: 0.99**n)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=7)
        self.job: Job = attach(
            self.network,
            self.optimizer,
            self.scheduler,
            scaler=self.scaler,
            adaptive=False,
            measuring={"every": 2},
            checkpoint_dir=directory,
            state=self.own_state(),
        )
        self.model = self.job.model  # as a script keeps it
        self.line = Line()
        self.job.coordinator.line.publisher = self.line  # type: ignore[assignment]
        self.loader = self.job.loader(data(), self.batch, per_gpu=self.per_gpu)
        self.used: list[tuple[int, int]] = []
        self.worlds: list[tuple[int, int]] = []
        """(optimizer step, ranks) where the number of ranks was new."""

    def make(self) -> nn.Module:
        norm = getattr(nn, os.environ.get("NORM", "BatchNorm1d"))
        layers = [nn.Linear(6, 16), norm(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)]
        return nn.Sequential(*layers)

    def own_state(self) -> Any:
        """What the script gives as `state=`."""
        return None

    def step(self, x: Tensor, y: Tensor, ids: Tensor) -> None:
        job, place = self.job, self.loader.data
        if place.local_samples:
            self.used += [(place.pass_index, int(i)) for i in ids]
        if not self.worlds or self.worlds[-1][1] != job.world.size:
            self.worlds.append((job.progress.optimizer_steps, job.world.size))
        with job.micro_batch():
            job.backward(mse_loss(self.model(x), y))
        if job.sync_gradients:
            self.update()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def update(self) -> None:
        """Take the optimizer's step."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def whole(self, tensor: Any) -> Tensor:
        found: Tensor = tensor.detach()
        return found

    def state(self) -> dict[str, Any]:
        moments = self.optimizer.state_dict()["state"].values()
        return {
            "steps": self.job.progress.optimizer_steps,
            "samples": self.job.progress.samples,
            "data": (self.loader.data.pass_index, self.loader.data.position),
            "weights": torch.cat([self.whole(p).flatten() for p in self.network.parameters()]),
            "moments": torch.tensor(
                [float(self.whole(v).double().sum()) for m in moments for v in m.values()]
            ),
            "statistics": [b.detach().float() for b in self.network.buffers()],
            "schedule": (self.scheduler.last_epoch, self.scheduler.get_last_lr()),
            "scale": self.scaler.state_dict(),
            "noise": self.job.training.models[0].averages.state_dict(),
            "batch": (self.job.local_batch, self.job.accumulation, self.job.batch_size),
            "random": torch.get_rng_state(),
            "place": tuple(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")),
        }


def follow(
    directory: Path, orders: list[dict[str, Any]], moves: int, training: Training | None = None
) -> dict[str, Any]:
    """Train until all orders are answered, and 12 steps more.

    Each order comes at least 4 steps after the last one took effect.
    """
    training = training or Training(directory)
    job, resizer = training.job, training.job.coordinator.resizer
    behave_as_joiner(training)
    end = time.monotonic() + PATIENCE - 10
    left = list(orders)
    since, code, number = 0, None, 0
    refused: dict[int, str] = {}
    try:
        for _ in job.epochs(10_000):
            for batch in training.loader:
                assert time.monotonic() < end, (number, refused)
                steps = job.progress.optimizer_steps
                if not training.worlds or training.worlds[-1][1] != job.world.size:
                    since = steps
                if job.coordinator.groups.generation == moves and steps >= since + 12:
                    break
                if resizer.refused:
                    refused[resizer.refused["id"]] = resizer.refused["why"]
                answered = number in (0, resizer.in_effect) or number in refused
                if job.is_main and left and answered and steps >= since + 4:
                    number = ask(training, left.pop(0))
                training.step(*batch)
                time.sleep(0.003)
            else:
                continue
            break
    except SystemExit as exit_:
        code = exit_.code
    await_answer(training)
    return {
        "code": code,
        "used": training.used,
        "worlds": training.worlds,
        "state": training.state(),
        "heard": training.line.heard,
        "refused": refused,
        "report": job.report(),
        "lent": os.environ.get(LENT_RANKS, "0"),
    }


def await_answer(training: Training) -> None:
    """Wait until the scheduler has heard the answer to a resize."""
    end = time.monotonic() + PATIENCE - 10
    while training.job.coordinator.resizer.answering:
        assert time.monotonic() < end
        time.sleep(0.005)


def ask(training: Training, wanted: dict[str, Any]) -> int:
    """Submit an order, and cause the trouble that it names."""
    trouble = wanted.get("trouble")
    training.job.coordinator.resizer.recruit_wait = 0.2 if trouble == "nobody comes" else 60.0
    store = training.job.coordinator.checkpointer.writer.store
    store.__dict__.pop("save", None)
    if trouble == "sbatch":

        def forbidden(*_: Any) -> str:
            raise RecruitmentFailed("sbatch refused the companion job: not from compute nodes")

        companion_job.submit = forbidden
    if trouble == "disk":

        def full(*_: Any, **__: Any) -> None:
            raise CheckpointError("no space left")

        store.save = full
        # After a failed checkpoint, the one of a resize has to be on disk before ranks end.
        training.job.coordinator.checkpointer.writer.trouble = "no space left"
    training.job.coordinator.order_resize(wanted)
    return int(wanted["id"])


def behave_as_joiner(training: Training) -> None:
    """Play a joiner that fails to join; the move's id says how it fails."""
    joiner = training.job.coordinator.joiner
    if joiner is None:
        return
    if joiner.move == 21:
        raise SystemExit("the data is not on this node")
    if joiner.move == 22:
        joiner.rendezvous.tell(joiner.key("ready/0"), training.job.coordinator.resizer.same())
        os._exit(9)
    if joiner.move == 23:
        training.job.training.models[0].module = nn.Linear(1, 1)
    if joiner.move == 19:
        training.job.coordinator.resizer.code["the agent"] = "another"


def retrace(directory: Path, until: int, make: Callable[[Path], Training] = Training) -> dict[str, Any]:
    """Restart the training from the checkpoint, up to a step."""
    training = make(directory)
    begun = training.job.progress.optimizer_steps
    for _ in training.job.epochs(10_000):
        for batch in training.loader:
            if training.job.progress.optimizer_steps == until:
                break
            training.step(*batch)
        else:
            continue
        break
    training.job.coordinator.save(durable=True)
    await_answer(training)
    report = training.job.report()
    return {"from": begun, "state": training.state(), "heard": training.line.heard, "report": report}
