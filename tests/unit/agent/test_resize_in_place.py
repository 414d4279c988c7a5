"""Resizes in place on real ranks: gloo on the loopback interface, orders put in by hand, joiners started by tests."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import pickle
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # before the forks: each rank would else import it
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from pollux import Job, attach, recruit, resize, stepping
from pollux.ability import Ability
from pollux.errors import LEFT_STATUS, RELAUNCH_STATUS, RETRY_STATUS, CheckpointError, RankLost
from pollux.keeping import fingerprint_of
from pollux.recruit import RecruitmentFailed
from pollux.reporting import report_of

PATIENCE = 100.0
EXAMPLES = 203  # prime to every batch size here: passes end in uneven tails


class Stage:
    """Ranks as forked processes: those that a test starts, and those of the companions that rank 0 asks for."""

    def __init__(self, directory: Path, free_port: Callable[[], int]) -> None:
        self.directory, self._port = directory, str(free_port())
        self._context = multiprocessing.get_context("fork")
        self._running: list[tuple[str, Any, Any]] = []
        self.companions: set[Path] = set()

    def start(
        self,
        nodes: list[str],
        body: Callable[..., Any],
        *args: Any,
        environment: dict[str, str] | None = None,
    ) -> None:
        """One rank on each node, in name."""
        for rank, node in enumerate(nodes):
            place = {"RANK": str(rank), "WORLD_SIZE": str(len(nodes)), "MASTER_PORT": self._port}
            self._fork(node, place | (environment or {}), body, args)

    def _fork(self, node: str, place: dict[str, str], body: Callable[..., Any], args: Any) -> None:
        fixed = {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "SLURMD_NODENAME": node,
        }
        here, there = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_rank, args=(body, args, fixed | place, there))
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
            for index in range(told["size"] - told["first"] if names else 0):
                place = {"RANK": str(index), "GROUP_RANK": str(index), "WORLD_SIZE": "2"}
                self._fork(names.pop(0), place | {"POLLUX_COMPANION": str(path)}, body, args)

    def results(self, names: list[str], body: Callable[..., Any] | None = None, *args: Any) -> dict[str, Any]:
        """What every rank returned, by node; companions are started as they are asked for, on the nodes `names`."""
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


@pytest.fixture
def stage(tmp_path: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> Stage:
    # The ranks are forked: what is set here holds in them.
    monkeypatch.setattr(resize, "ability_of", lambda *_: Ability.IN_PLACE)
    monkeypatch.setattr(recruit, "submit", lambda *_: "1")
    monkeypatch.setattr(resize, "GONE_WAIT", 1.0)
    monkeypatch.setattr(stepping, "EXCHANGE_INTERVAL", 0.0)
    return Stage(tmp_path, free_port)


class Line:
    """Stands for the publisher: takes acknowledgements."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, int]] = []

    def acknowledge(self, reallocation: int, payload: dict[str, Any]) -> bool:
        self.heard.append((reallocation, payload["step"]))
        return True

    def wake(self) -> None: ...

    def close(self) -> None: ...


def order(number: int, nodes: str, kind: str, path: str = "resize", **more: str) -> dict[str, Any]:
    return {"id": number, "path": path, "kind": kind, "nodes": nodes.split(), "gpus_per_node": 1, **more}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(EXAMPLES, 6, generator=generator)
    y = x @ torch.randn(6, 1, generator=generator) + 0.3 * torch.randn(EXAMPLES, 1, generator=generator)
    return TensorDataset(x, y, torch.arange(EXAMPLES))


class Training:
    """A script with a bit of everything that has state."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)]
        self.network = nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=0.01)
        self.scheduler = LambdaLR(self.optimizer, lambda n: 0.99**n)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=7)
        self.job: Job = attach(
            self.network,
            self.optimizer,
            self.scheduler,
            scaler=self.scaler,
            adaptive=False,
            sampling=2,
            checkpoint_dir=directory,
        )
        self.model = self.job.model  # as a script keeps it
        self.line = Line()
        self.job._restart._publisher = self.line  # type: ignore[assignment]
        self.loader = self.job.loader(data(), 24, per_gpu=(1, 12))
        self.used: list[tuple[int, int]] = []
        self.worlds: list[tuple[int, int]] = []
        """(optimizer step, ranks) where the number of ranks was new."""

    def step(self, x: Tensor, y: Tensor, ids: Tensor) -> None:
        job, place = self.job, self.loader.data
        if place.local_samples:
            self.used += [(place.pass_index, int(i)) for i in ids]
        if not self.worlds or self.worlds[-1][1] != job.world.size:
            self.worlds.append((job.progress.optimizer_steps, job.world.size))
        with job.micro_batch():
            job.backward(mse_loss(self.model(x), y))
        if job.sync_gradients:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def state(self) -> dict[str, Any]:
        moments = self.optimizer.state_dict()["state"].values()
        return {
            "steps": self.job.progress.optimizer_steps,
            "samples": self.job.progress.samples,
            "data": (self.loader.data.pass_index, self.loader.data.position),
            "weights": torch.cat([p.detach().flatten() for p in self.network.parameters()]),
            "moments": torch.tensor([float(v.double().sum()) for m in moments for v in m.values()]),
            "statistics": torch.cat([b.detach().float().flatten() for b in self.network.buffers()]),
            "schedule": (self.scheduler.last_epoch, self.scheduler.get_last_lr()),
            "scale": self.scaler.state_dict(),
            "noise": self.job._averages.state_dict(),
            "batch": (self.job.local_batch, self.job.accumulation, self.job.batch_size),
            "random": torch.get_rng_state(),
            "place": tuple(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")),
        }


def follow(
    directory: Path, orders: list[dict[str, Any]], moves: int, training: Training | None = None
) -> dict[str, Any]:
    """Train through the orders, each a few steps after the one before, and a dozen steps more after the last move."""
    training = training or Training(directory)
    job, resizer = training.job, training.job._resizer
    behave_as_joiner(training)
    end = time.monotonic() + PATIENCE - 10
    left = list(orders)
    since, code, number = 0, None, 0
    refused: dict[int, str] = {}
    try:
        for _ in job.epochs(10_000, passes=True):
            for batch in training.loader:
                assert time.monotonic() < end, (number, refused)
                steps = job.progress.optimizer_steps
                if not training.worlds or training.worlds[-1][1] != job.world.size:
                    since = steps
                if resizer.generation == moves and steps >= since + 12:
                    break
                if resizer.refused:
                    refused[resizer.refused["id"]] = resizer.refused["why"]
                answered = number in (0, resizer.resized) or number in refused
                if job.is_main and left and answered and steps >= since + 4:
                    number = ask(training, left.pop(0))
                training.step(*batch)
                time.sleep(0.003)
            else:
                continue
            break
    except SystemExit as exit_:
        code = exit_.code
    return {
        "code": code,
        "used": training.used,
        "worlds": training.worlds,
        "state": training.state(),
        "heard": training.line.heard,
        "refused": refused,
        "report": report_of(job),
        "exit": RankLost.exit_status,
    }


def ask(training: Training, wanted: dict[str, Any]) -> int:
    """Put an order in, and bring about the trouble that it names."""
    trouble = wanted.get("trouble")
    os.environ["POLLUX_RECRUIT_WAIT"] = "0.2" if trouble == "nobody comes" else "60"
    store = training.job._restart._keeper.store
    store.__dict__.pop("save", None)
    if trouble == "sbatch":

        def forbidden(*_: Any) -> str:
            raise RecruitmentFailed("sbatch refused the companion job: not from compute nodes")

        recruit.submit = forbidden
    if trouble == "disk":

        def full(*_: Any, **__: Any) -> None:
            raise CheckpointError("no space left")

        store.save = full
    training.job._resizer.ask(wanted)
    return int(wanted["id"])


def behave_as_joiner(training: Training) -> None:
    """A companion's rank that does not come in, by the move that it was to be for."""
    joiner = training.job._resizer._joiner
    if joiner is None:
        return
    if joiner._number == 21:
        raise SystemExit("the data is not on this node")
    if joiner._number == 22:
        ready = {"fingerprint": fingerprint_of([training.network])}
        joiner.meeting.tell(joiner._key("ready/0"), ready)
        os._exit(9)
    if joiner._number == 23:
        training.job.module = nn.Linear(1, 1)


def retrace(directory: Path, until: int) -> dict[str, Any]:
    """The same training restarted from the checkpoint, up to an optimizer step; its state there, checkpointed."""
    training = Training(directory)
    begun = training.job.progress.optimizer_steps
    for _ in training.job.epochs(10_000, passes=True):
        for batch in training.loader:
            if training.job.progress.optimizer_steps == until:
                break
            training.step(*batch)
        else:
            continue
        break
    training.job.stepper.save(durable=True)
    end = time.monotonic() + PATIENCE - 10
    while training.job._resizer._answering:
        assert time.monotonic() < end
        time.sleep(0.005)
    report = report_of(training.job)
    return {"from": begun, "state": training.state(), "heard": training.line.heard, "report": report}


def assert_same(found: Any, expected: Any, what: str, **tolerance: float) -> None:
    if isinstance(expected, Tensor) and expected.is_floating_point():
        torch.testing.assert_close(found, expected, msg=lambda m: f"{what}: {m}", **tolerance)
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected), what
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key], f"{what}.{key}", **tolerance)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b, what, **tolerance)
    else:
        assert found == pytest.approx(expected, rel=1e-4), what


def test_a_training_goes_through_resizes_as_through_restarts(
    stage: Stage, tmp_path: Path, free_port: Any
) -> None:
    """4 -> 2 -> 3 -> 1 -> 2 ranks in living processes, against checkpoints and restarts at the same steps."""
    orders = [
        order(11, "n1 n2", "shrink"),
        order(12, "n1 n2 n5", "grow"),
        order(13, "n1", "shrink"),
        order(14, "n1 n6", "grow"),
    ]
    stage.start(["n1", "n2", "n3", "n4"], follow, tmp_path, orders, len(orders))
    found = stage.results(["n5", "n6"], follow, tmp_path, orders, len(orders))
    assert {n: r["code"] for n, r in found.items()} == {
        **{"n1": None, "n6": None},
        **dict.fromkeys(["n2", "n3", "n4", "n5"], LEFT_STATUS),
    }
    first = found["n1"]
    sizes = [size for _, size in first["worlds"]]
    assert sizes == [4, 2, 3, 1, 2]
    assert [rank["exit"] for rank in (first, found["n6"])] == [RETRY_STATUS, 1], (
        "a companion's loss is mended"
    )

    # Whoever left said so before the scheduler heard of it, and of the newest move it hears what it cost.
    steps = [step for step, _ in first["worlds"][1:]]
    assert first["heard"] == [(11, steps[0]), (13, steps[2])]
    report = first["report"]
    assert (report["resize"], report["resized"], report["gpus"]) == ("in-place", 14, 2)
    assert 0 < report["resize_cost"] < PATIENCE
    assert "resize_refused" not in report
    print(f"pause of the last resize: {report['resize_cost']:.3f} s")

    # Each sample once in each pass, whichever ranks there were.
    counts = Counter(sample for rank in found.values() for sample in rank["used"])
    passes = max(number for number, _ in counts)
    assert passes >= 2
    assert max(counts.values()) == 1
    assert all((number, i) in counts for number in range(passes) for i in range(EXAMPLES))
    assert sum(counts.values()) == first["state"]["samples"]

    # The same steps by checkpoints and restarts. All ranks hold the same, but for random numbers and statistics,
    # which are each rank's own until the next pass.
    again = tmp_path / "again"
    for size, until in zip(sizes, [*steps, first["state"]["steps"]], strict=True):
        stage = Stage(again, free_port)
        stage.start([f"n{k}" for k in range(1, size + 1)], retrace, again, until)
        expected = stage.results([])
    for mine, theirs in (("n1", "n1"), ("n6", "n2")):
        assert_same(found[mine]["state"], expected[theirs]["state"], mine, rtol=1e-4, atol=1e-5)
    for part in ("weights", "moments"):
        assert torch.equal(first["state"][part], found["n6"]["state"][part])


# -- what may go wrong ----------------------------------------------------------------------------------------


def test_what_cannot_be_done_is_refused_and_the_training_goes_on(stage: Stage, tmp_path: Path) -> None:
    orders = [
        order(20, "n2", "shrink"),
        order(21, "n1 n2 n3", "grow"),
        order(22, "n1 n2 n4", "grow"),
        order(23, "n1 n2 n5", "grow"),
        order(24, "n1 n2 n6", "grow", trouble="nobody comes"),
        order(25, "n1", "shrink", "relaunch", trouble="disk"),
        order(26, "n1 n2 n7", "grow", trouble="sbatch"),
        order(27, "n1 n2", "grow"),
        order(28, "n1 n2 n8", "grow", step="started"),
        {"id": 29, "path": "resize"},
        order(30, "n1", "shrink"),
    ]
    stage.start(["n1", "n2"], follow, tmp_path, orders, 1)
    found = stage.results(["n3", "n4", "n5"], follow, tmp_path, orders, 1)
    first = found["n1"]
    expected = {
        20: "rank 0's node, n1, is to stay",
        21: "script has ended before its training",
        22: "not every joiner that was ready answers",
        23: "makes another model",
        24: "1 of 1 joiners were not ready after 0 s",
        25: "no checkpoint could be written",
        26: "not from compute nodes",
        27: "expected the nodes n1, n2 and more",
        28: "recruited nobody",
        29: "not an order that this agent knows",
    }
    assert first["refused"].keys() == expected.keys()
    for number, why in expected.items():
        assert why in first["refused"][number]
    assert [size for _, size in first["worlds"]] == [2, 1]
    assert first["heard"] == [(30, first["worlds"][1][0])]
    assert (first["report"]["resized"], first["report"]["resize_refused"]["id"]) == (30, 29)
    counts = Counter(sample for node in ("n1", "n2") for sample in found[node]["used"])
    assert max(counts.values()) == 1
    assert sum(counts.values()) == first["state"]["samples"]
    assert found["n5"]["code"] == LEFT_STATUS, "a joiner that is not wanted ends well"
    assert not list(tmp_path.glob("companion-*"))


def lose(directory: Path, orders: list[dict[str, Any]]) -> dict[str, Any]:
    """n2 is to leave, and dies; n3 comes in, and dies in its fifth step. What n1 makes of it."""
    node, steps = os.environ["SLURMD_NODENAME"], 0

    def die(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            os._exit(9)

    training = Training(directory)
    if node == "n2":
        resize.Resizer._leave = lambda *_: os._exit(9)  # type: ignore[assignment,method-assign,return-value]
    if node == "n3":
        training.optimizer.register_step_pre_hook(die)
    try:
        return follow(directory, orders, 99, training)
    except RankLost as error:
        training.job._restart.keeps(0)  # the checkpoint under way is written
        return {"status": error.exit_status, "worlds": training.worlds}


def test_a_rank_that_dies_instead_of_leaving_and_a_companion_that_is_lost(
    stage: Stage, tmp_path: Path, free_port: Any
) -> None:
    orders = [order(41, "n1", "shrink"), order(42, "n1 n3", "grow")]
    stage.start(["n1", "n2"], lose, tmp_path, orders)
    found = stage.results(["n3"], lose, tmp_path, orders)
    assert (found["n2"], found["n3"]) == ("died", "died")
    assert found["n1"]["status"] == RETRY_STATUS, "the job's own nodes begin again without it"
    assert [size for _, size in found["n1"]["worlds"]] == [2, 1, 2]
    # Nothing is lost but what came after the last resize.
    last = found["n1"]["worlds"][-1][0]
    again = Stage(tmp_path, free_port)
    again.start(["n1"], retrace, tmp_path, last + 2)
    assert again.results([])["n1"]["from"] == last


def test_a_relaunch_goes_on_where_all_ranks_ended(stage: Stage, tmp_path: Path, free_port: Any) -> None:
    stage.start(["n1", "n2"], follow, tmp_path, [order(51, "n1", "shrink", "relaunch")], 1)
    found = stage.results([])
    assert [found[node]["code"] for node in ("n1", "n2")] == [RELAUNCH_STATUS, LEFT_STATUS]
    stopped = found["n1"]["state"]
    assert found["n1"]["heard"] == [], "its next life acknowledges"

    again = Stage(tmp_path, free_port)
    environment = {"POLLUX_RESIZED": "51", "POLLUX_LEFT": "n2"}
    again.start(["n1"], retrace, tmp_path, stopped["steps"] + 5, environment=environment)
    relaunched = again.results([])["n1"]
    assert relaunched["from"] == stopped["steps"]
    assert relaunched["heard"] == [(51, stopped["steps"])]
    assert relaunched["report"]["resized"] == 51
    assert 0 < relaunched["report"]["resize_cost"] < PATIENCE
