"""Keras by its callback: plain Keras's weights on both backends, moves between numbers of ranks, refusals.

On forked ranks: a process has one backend, and JAX has threads.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import sys
from pathlib import Path

import pytest

from docs.generate import EXAMPLES
from tests.unit.agent.conftest import run_ranks

if importlib.util.find_spec("keras") is None:  # its import needs a backend
    pytest.skip("keras is not installed", allow_module_level=True)

SAME = """
import sys
import keras, numpy as np, torch
from torch.utils.data import TensorDataset
from pollux.integrations.keras import Elastic

x = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
y = x.sum(1, keepdims=True)
weight = np.linspace(0.5, 1.5, 96, dtype="float32")
optimizers = [
    ("SGD", {"momentum": 0.9, "nesterov": True}, 1.0),
    ("AdamW", {"beta_1": 0.8, "weight_decay": 0.1}, 0.5),
]

for name, options, factor in optimizers:
    weights, losses = [], []
    for elastic in (None, Elastic(TensorDataset(*map(torch.from_numpy, (x, y, weight))), 16,
                                  loader={"shuffle": False}, attach={"adaptive": False})):
        keras.utils.set_random_seed(0)
        layers = keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)
        model = keras.Sequential([keras.layers.Input((6,)), *layers])
        optimizer = getattr(keras.optimizers, name)(learning_rate=0.01, **options)
        model.compile(optimizer, "mse", weighted_metrics=["mae"])
        rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * factor)
        common = {"shuffle": False, "verbose": 0, "validation_data": (x, y)}
        for epochs in (2, 1):  # the second call goes on with the optimizer's averages
            if elastic is None:
                history = model.fit(
                    x, y, sample_weight=weight, batch_size=16, callbacks=[rates], epochs=epochs, **common
                )
            else:
                history = model.fit(elastic.batches(), callbacks=[elastic, rates], epochs=epochs, **common)
        weights.append(model.get_weights())
        losses.append([history.history[key] for key in ("loss", "mae", "val_loss")])
    for plain, ours in zip(*weights):
        np.testing.assert_allclose(ours, plain, atol=2e-4, err_msg=name)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3, err_msg=name)
"""

REFUSED = """
import keras
from pollux.errors import PolluxAgentError
from pollux.integrations.keras import Elastic, options_of

of = keras.optimizers
schedule = of.schedules.ExponentialDecay(0.1, 10, 0.9)
for optimizer in (of.Lion(), of.Adam(schedule), of.Adam(clipnorm=1.0), of.SGD(weight_decay=0.1)):
    try:
        print(options_of(optimizer, "torch"))
    except PolluxAgentError as error:
        print(error)
try:
    Elastic([], 8).job
except PolluxAgentError as error:
    print(error)
"""


def printed(script: str, backend: str, *arguments: str, ranks: int = 1, **environment: str) -> str:
    """Run a script on forked ranks; return what they print."""

    def body() -> str:
        sys.argv = ["script", *arguments]
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            exec(compile(script, "script", "exec"), {"__name__": "__main__"})
        return out.getvalue()

    return "".join(run_ranks(ranks, body, env={"KERAS_BACKEND": backend, **environment}))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_fixed_batch_has_the_weights_and_metrics_of_plain_keras(backend: str) -> None:
    printed(SAME, backend)


@pytest.mark.slow
def test_the_example_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    plain, elastic = ((EXAMPLES / kind / "keras_digits.py").read_text() for kind in ("plain", "elastic"))
    folder = {"POLLUX_CHECKPOINT_DIR": str(tmp_path)}
    assert "16 per GPU" in printed(elastic, "torch", "4", ranks=2, **folder)
    rest = printed(elastic, "torch", "12", **folder)
    assert "restored the checkpoint" in rest
    low, _ = sorted(re.findall("accuracy ([0-9.]+)", printed(plain, "torch", "8") + rest))
    assert float(low) > 0.8


STOPPED = """
import keras, torch
from pollux.integrations.keras import Elastic

class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training |= epoch == 1

x = torch.randn(32, 2, generator=torch.Generator().manual_seed(0))
elastic = Elastic(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 16)
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
model.compile("sgd", "mse")
common = {"epochs": 4, "shuffle": False, "verbose": 0, "validation_data": (x.numpy(), x.sum(1, keepdim=True).numpy())}
history = model.fit(elastic.batches(), callbacks=[elastic, Stop()], **common)
print("epochs", history.epoch, history.history.get("val_loss"))
"""


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_training_that_callbacks_have_stopped_stays_ended(backend: str, tmp_path: Path) -> None:
    for epochs in ([0, 1], [], []):
        said = printed(STOPPED, backend, ranks=2, POLLUX_CHECKPOINT_DIR=str(tmp_path))
        first, second = re.findall("^epochs .*", said, re.MULTILINE)
        assert first == second, "evaluated with the same moving averages"
        assert first.startswith(f"epochs {epochs} ")


PLATEAU = """
import os, sys
import keras, torch
from pollux.integrations.keras import Elastic

class Script(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["m"] = [1.0, 0.1, 0.5, 0.6, 0.7, 0.8][epoch]

class Stop(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if elastic.job.progress.optimizer_steps == int(sys.argv[2]):
            elastic.job.coordinator.save(durable=True)
            raise KeyboardInterrupt

x = torch.randn(32, 2, generator=torch.Generator().manual_seed(0))
elastic = Elastic(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 16)
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1), "mse")
kept = {"save_best_only": True, "save_weights_only": True}
best = keras.callbacks.ModelCheckpoint(sys.argv[1] + "/best.weights.h5", "m", mode="min", **kept)
plateau = keras.callbacks.ReduceLROnPlateau("m", mode="min", patience=1, factor=0.1)
try:
    callbacks = [elastic, Script(), best, plateau, Stop()]
    model.fit(elastic.batches(), epochs=6, shuffle=False, verbose=0, callbacks=callbacks)
except KeyboardInterrupt:
    pass
print("rate", round(float(model.optimizer.learning_rate), 9), "best", best.best if elastic.job.is_main else None,
      os.path.getmtime(sys.argv[1] + "/best.weights.h5") if elastic.job.is_main else None)
"""


def test_what_callbacks_have_counted_survives_a_restart_and_rank_0_writes_alone(tmp_path: Path) -> None:
    def rate(said: str) -> tuple[str, ...]:
        return re.findall(r"^rate (\S+) best (\S+) (\S+)", said, re.MULTILINE)[0]

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    plain = rate(printed(PLATEAU, "torch", str(whole), "99", POLLUX_CHECKPOINT_DIR=str(whole)))
    environment = {"POLLUX_CHECKPOINT_DIR": str(parts)}
    before = rate(printed(PLATEAU, "torch", str(parts), "7", ranks=2, **environment))
    after = rate(printed(PLATEAU, "torch", str(parts), "99", ranks=2, **environment))
    assert after[:2] == plain[:2]
    assert after[2] == before[2], "the file of the best epoch stays"
    assert before[0] != plain[0]


OWN = """
import keras, torch
from pollux.errors import PolluxAgentError
from pollux.integrations.keras import Elastic

class Own(keras.Sequential):
    def train_step(self, data):
        return {}

class Function(keras.Sequential):
    def make_train_function(self, force=False):
        pass

limit = {"kernel_constraint": keras.constraints.MaxNorm(1.0)}
fixed = keras.optimizers.AdamW(0.1)
fixed.exclude_from_weight_decay(var_names=["bias"])
x = torch.zeros(32, 2)
for kind, options, optimizer, fit in (
    (Own, {}, "sgd", {}),
    (Function, {}, "sgd", {}),
    (keras.Sequential, limit, "sgd", {}),
    (keras.Sequential, {}, fixed, {}),
    (keras.Sequential, {}, "sgd", {"steps_per_epoch": 2}),
):
    model = kind([keras.layers.Input((2,)), keras.layers.Dense(1, **options)])
    model.compile(optimizer, "mse")
    elastic = Elastic(torch.utils.data.TensorDataset(x, x), 16)
    try:
        model.fit(elastic.batches(), callbacks=[elastic], verbose=0, **fit)
    except PolluxAgentError as error:
        print(error)
"""


def test_what_keras_would_do_and_the_agent_cannot_is_refused_at_the_start() -> None:
    said = printed(OWN, "torch").splitlines()
    expected = (
        "train_step",
        "make_train_function",
        "constraints",
        "exclude_from_weight_decay",
        "steps_per_epoch",
    )
    for line, name in zip(said[-5:], expected, strict=True):
        assert name in line


def test_what_the_agent_cannot_train_with_is_refused() -> None:
    lion, schedule, clipped, decayed, early = printed(REFUSED, "torch").splitlines()[-5:]
    assert lion == "expected one of Keras's optimizers SGD, Adam, AdamW, got Lion"
    assert "use keras.callbacks.LearningRateScheduler" in schedule
    assert clipped == "expected keras.optimizers.Adam without clipnorm"
    assert decayed == "expected keras.optimizers.SGD without weight_decay"
    assert "the job is made by fit()" in early
