"""No training is taken for another one, however its script skips, edits, orders or repeats.

Each script runs as processes of its own, one start after another, and each answer is compared with a plain run of it.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.one_process

PRELUDE = """
import json, os, sys
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import Subset, TensorDataset
import pollux

torch.set_num_threads(1)
START, HERE = int(os.environ["START"]), os.environ["HERE"]
x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(x, x.sum(1, keepdim=True))


def part(k):
    return Subset(DATA, [i for i in range(96) if i % 4 != k])


def train(result, *, data=DATA, rate=0.05, times=1.0, seed=None, epochs=2, dies=False, drops=False, **options):
    if seed is not None:
        torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Dropout(0.2 * drops), torch.nn.Linear(4, 1))
    job = pollux.attach(model, torch.optim.SGD(model.parameters(), rate), adaptive=False, **options)
    loader = job.loader(data, 24)
    begun = job.progress.optimizer_steps
    for _ in job.epochs(epochs):
        for a, b in loader:
            if dies and job.progress.optimizer_steps == 4:
                job.coordinator.save(durable=True)
                os._exit(1)
            job.step(lambda: times * mse_loss(job.model(a), b))
    job.close()
    done(result, job.progress.optimizer_steps - begun, model)


def done(name, steps, model):
    with open(f"{HERE}/results", "a") as file:
        weights = [round(w, 4) for p in model.parameters() for w in p.flatten().tolist()]
        print(json.dumps([str(name), START, steps, weights]), file=file)


def exists(name):
    return os.path.exists(f"{HERE}/results") and any(
        json.loads(line)[0] == str(name) for line in open(f"{HERE}/results")
    )
"""


def start(script: Path, said: Path, environ: dict[str, str]) -> int:
    """Run a script as a process that is forked, so that torch is imported once; return its exit status."""
    pid, leave = os.fork(), os._exit
    if not pid:
        status = 1
        try:
            file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, 1)
            os.dup2(file, 2)
            logging.getLogger().handlers = []
            os.environ.pop("POLLUX_CHECKPOINT_DIR", None)
            os.environ.update(environ)
            sys.argv, sys.stderr = [str(script)], os.fdopen(2, "w")
            runpy.run_path(str(script), run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            leave(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Ran:
    """What the starts of a script left: the results, the weights by training, and how the last start ended."""

    def __init__(self, folder: Path, body: str, starts: int, plain: bool) -> None:
        folder.mkdir(mode=0o700)
        script, said = folder.parent / "train.py", folder / "said"
        place = {} if plain else {"POLLUX_CHECKPOINT_DIR": str(folder / "checkpoints")}
        for number in range(starts):
            script.write_text((PRELUDE + body).replace("EDIT\n", "edited = True\n" * number))
            self.status = start(script, said, {"START": str(number), "HERE": str(folder), **place})
        self.said = said.read_text()
        lines = (folder / "results").read_text().splitlines() if (folder / "results").exists() else []
        self.results: list[list[Any]] = [json.loads(line) for line in lines]
        self.weights = {name: weights for name, _, _, weights in self.results}


def in_starts(tmp_path: Path, body: str, starts: int = 2) -> Ran:
    return Ran(tmp_path / "ours", body, starts, False)


def as_plain(tmp_path: Path, body: str) -> dict[str, Any]:
    """The weights of the same trainings in one undisturbed start without checkpoints."""
    ran = Ran(tmp_path / "plain", "os._exit = id\n" + body.replace("dies=", "dies=False and "), 1, True)
    assert not ran.status, ran.said
    return ran.weights


TRAINED = {
    "skips finished folds": """
for fold in range(3):
    if exists(fold):
        continue
    train(fold, data=part(fold), seed=7, dies=START == 0 and fold == 1)
""",
    "skips finished folds, killed between two": """
for fold in range(3):
    if exists(fold):
        continue
    train(fold, data=part(fold), seed=7)
    if START == 0 and fold == 0:
        os._exit(1)
""",
    "skips finished seeds of one model and data": """
for seed in (3, 4, 5):
    if not exists(seed):
        train(seed, seed=seed, dies=START == 0 and seed == 4)
""",
    "in another order after the restart": """
order = [2, 0, 1] if START else [0, 1, 2]
for fold in order:
    train(fold, data=part(fold), seed=7, dies=START == 0 and fold == 1)
""",
    "a fold is tried again after an error": """
for fold in range(2):
    for attempt in range(2):
        try:
            if fold == 1 and attempt == 0:
                raise RuntimeError
            train(fold, data=part(fold), seed=7, dies=START == 0 and fold == 1)
            break
        except RuntimeError:
            pass
""",
    "names, in any order": """
for k in ((2, 1, 0) if START else (0, 1, 2)):
    train(k, data=part(k), seed=k, dies=START == 0 and k == 1, name=f"fold-{k}")
""",
    "learning rates of one seed, skipped": """
for rate in (0.1, 0.05, 0.01):
    if not exists(rate):
        train(rate, rate=rate, seed=7, dies=START == 0 and rate == 0.05)
""",
    "two phases in each fold, the first one skipped": """
for fold in range(2):
    if not exists(f"{fold}-first"):
        train(f"{fold}-first", data=part(fold), seed=fold, name=f"{fold}-first")
    train(f"{fold}-second", data=part(fold), seed=10 + fold, dies=START == 0 and fold == 1)
""",
    "a comprehension over what is left": """
[train(k, data=part(k), seed=k, dies=START == 0 and k == 1) for k in range(3) if not exists(k)]
""",
    "splits drawn from one seed, with dropout": """
torch.manual_seed(7)
for fold in range(3):
    drawn = Subset(DATA, torch.randperm(96)[:72].tolist())
    train(fold, data=drawn, drops=True, dies=START == 0 and fold == 2)
""",
    "straight lines of one seed and data, the first one skipped": """
if not exists("a"):
    train("a", seed=7)
train("b", seed=7, times=2.0, dies=START == 0)
""",
    "straight lines in another order, and edited": """
EDIT
if START == 0:
    train("a", seed=7)
    train("b", seed=7, times=2.0, dies=START == 0)
else:
    train("b", seed=7, times=2.0, dies=START == 0)
    train("a", seed=7)
""",
    "two on one line, in a function, the first one skipped": """
def both():
    exists("a") or train("a", seed=7); train("b", seed=7, times=2.0, dies=START == 0)
both()
""",
    "a folder of the script's, the first fold skipped": """
for fold in range(2):
    if not exists(fold):
        train(fold, seed=7, times=1.0 + fold, checkpoint_dir=f"{HERE}/own", dies=START == 0 and fold == 1)
""",
    "a text that is executed twice, once skipped": """
text = "train(which, seed=7, times=times, dies=START == 0 and which == 'b')"
if not exists("a"):
    exec(text, globals() | {"which": "a", "times": 1.0})
exec(text, globals() | {"which": "b", "times": 2.0})
""",
    "scripts of one name in a driver, the first one skipped": """
import runpy
for k in range(2):
    os.makedirs(f"{HERE}/{k}", exist_ok=True)
    with open(f"{HERE}/{k}/fold.py", "w") as file:
        file.write("train(k, seed=7, times=1.0 + k, dies=START == 0 and k == 1)")
if not exists(0):
    runpy.run_path(f"{HERE}/0/fold.py", globals() | {"k": 0})
runpy.run_path(f"{HERE}/1/fold.py", globals() | {"k": 1})
""",
    "Optuna asks other settings after the restart": """
import optuna
optuna.logging.set_verbosity(optuna.logging.ERROR)
study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=START))

def objective(trial):
    times = trial.suggest_float("times", 0.5, 1.5)
    if START or not trial.number:
        train(f"{START}-{trial.number}-{times:.4f}", seed=7, times=times)
    return times

study.optimize(objective, n_trials=2)
for t in range(1):
    trial = study.ask()
    study.tell(trial, objective(trial))
""",
    "the runs of a W&B sweep": """
import types
wandb = sys.modules["wandb"] = types.ModuleType("wandb")
for number in range(1):
    wandb.run = types.SimpleNamespace(id=f"run-{START}", sweep_id="sweep")
    train(START, seed=7, times=1.0 + START)
""",
    "the runs of a multirun of Hydra's, the first one skipped": """
from types import ModuleType, SimpleNamespace as of
hydra = sys.modules["hydra.core.hydra_config"] = ModuleType("hydra_config")

def one(rate):
    job = of(override_dirname=f"rate={rate}")
    hydra.HydraConfig = of(instance=lambda: of(cfg=of(hydra=of(mode=of(name="MULTIRUN"), job=job))))
    exists(rate) or train(rate, rate=rate, seed=7, dies=START == 0 and rate == 0.05)

list(map(one, (0.1, 0.05)))
""",
    "a notebook, whose kernel is given a file of each start": """
sys.modules["ipykernel"], sys.argv = sys, ["kernel", f"-f={START}"]
train("a", seed=7)
train("b", seed=8, dies=START == 0)
""",
    "an objective that a library calls, in another order after the restart": """
from functools import reduce
order = [1, 0, 2] if START else [0, 1, 2]
reduce(lambda _, k: train(k, seed=k, dies=START == 0 and k == 1), order, None)
""",
    "forks and programs that the script starts": """
import posix
os.environ |= {"POLLUX_RUN_PROCESS": f"here:1:{START}", "POLLUX_RANK_PROCESS": str(os.getpid())}
train("own", seed=7)
for k in range(3):
    if not (child := os.fork()):
        sys.argv.append(f"--part={k % 2}")
        train(f"fold-{k // 2}" + sys.argv[-1], seed=7, times=2.0 + k, dies=START == 0 and k == 1)
        posix._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
""",
}


@pytest.mark.parametrize("body", TRAINED.values(), ids=TRAINED)
def test_each_training_is_what_a_plain_run_makes_of_it(body: str, tmp_path: Path) -> None:
    ran = in_starts(tmp_path, body)
    assert not ran.status, ran.said
    plain = as_plain(tmp_path, body)
    assert ran.weights.keys() >= plain.keys()
    for name, weights in plain.items():
        assert ran.weights[name] == weights, name


REFUSED = {
    "a while loop of the same calls": (
        """
k = 0
while k < 3:
    torch.manual_seed(k)
    train("same")
    k += 1
""",
        1,
        "a restart could not tell the two apart",
    ),
    "data by hand, the first one skipped": (
        """
k = sum(exists(k) for k in range(4))
train(k, data=part(k), seed=7)
""",
        2,
        "sample 0 of the dataset is another one",
    ),
    "a counter in the environment": ("train(START, seed=START)", 2, "its seed was 0, and is 1"),
    "a learning rate edited after the end": (
        "train(START, seed=7, rate=0.05 if START else 0.1)",
        2,
        "lr of parameter group 0 0.1",
    ),
    "a longer set of data after the end": (
        "train(START, seed=7, data=DATA if START else part(0))",
        2,
        "the dataset had 72 samples",
    ),
    "a notebook of another seed": (
        "import types\nsys.modules['ipykernel'] = types\nsys.argv = ['kernel', str(START)]\nSEED = START\n"
        "torch.manual_seed(SEED)\ntrain('a')",
        2,
        "its seed was 0, and is 1. It",
    ),
    "an argument by hand, the first one skipped": (
        """
which = "b" if exists("a") else "a"
train(which, seed=7, times=2.0 if which == "b" else 1.0)
""",
        2,
        "its call had another train.result, train.times",
    ),
    "processes of a pool": (
        """
import multiprocessing
for k in range(2):
    child = multiprocessing.get_context("fork").Process(target=train, args=(k,), kwargs={"seed": 7, "times": 1.0 + k})
    child.start()
    child.join()
sys.exit(child.exitcode)
""",
        1,
        "its call had another train.result, train.times",
    ),
    "processes of one start that nothing tells apart": (
        """
import multiprocessing
os.environ["POLLUX_RUN_PROCESS"] = "here:1:1"
for FOLD in range(2):
    child = multiprocessing.get_context("fork").Process(target=lambda: (torch.manual_seed(FOLD), train("same")))
    child.start()
    child.join()
sys.exit(child.exitcode)
""",
        1,
        "a restart could not tell the two apart",
    ),
    "partial functions, the first one skipped": (
        """
from functools import partial
for begin in [partial(train, "a", seed=7), partial(train, "b", seed=7, times=2.0)]:
    if not exists(begin.args[0]):
        begin()
        sys.exit(1)
""",
        2,
        "its call had another train.result, train.times",
    ),
    "a model with another dropout, the first one skipped": (
        "train(START, seed=7, drops=not START) if START else train(START, seed=7, drops=not START)",
        2,
        "its model had other layers",
    ),
    "another line before the first one has ended": (
        """
if START == 0:
    train("a", seed=7, dies=True)
train("b", seed=7, times=2.0)
""",
        2,
        "which has not ended",
    ),
}


@pytest.mark.parametrize(("body", "starts", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_told_apart_is_refused_with_what_to_write(
    body: str, starts: int, words: str, tmp_path: Path
) -> None:
    ran = in_starts(tmp_path, body, starts)
    assert ran.status
    assert words in ran.said
    assert "name=" in ran.said or "restore the dataset" in ran.said
    assert len({str(weights) for weights in ran.weights.values()}) == len(ran.weights), (
        "no result of another training"
    )


def test_the_same_command_after_its_end_returns_its_result(tmp_path: Path) -> None:
    """As a requeue during the export after a training does. The seed is none that the script gives."""
    ran = in_starts(tmp_path, "train('only')", 3)
    assert not ran.status, ran.said
    assert [steps for _, _, steps, _ in ran.results] == [8, 0, 0]
    assert len({str(weights) for *_, weights in ran.results}) == 1


def test_two_at_the_same_time_do_not_share_a_folder(tmp_path: Path) -> None:
    """As tasks of an array of seeds with one checkpoint_dir. The end of the first process lets the folder go."""
    body = """
from pollux.slurm_job.attempt import attached

forked = False
while True:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job = pollux.attach(model, optimizer, adaptive=False, checkpoint_dir=f"{HERE}/own")
    if forked:
        os._exit(0)
    forked = os.fork() == 0
    if not forked:
        break
    for each in attached.counts, attached.known, attached.taken:  # as another process
        each.clear()
    os.environ["SLURM_JOB_ID"] = "12"
_, status = os.wait()
job.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    ran = in_starts(tmp_path, body)
    assert ran.status == 1
    assert "another training writes its checkpoints to" in ran.said
    assert "checkpoint_dir" in ran.said
