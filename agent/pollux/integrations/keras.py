"""Keras 3 with an elastic batch size, through its torch or its JAX backend.

    elastic = Elastic(TensorDataset(x, y), batch_size=32, max_batch_size=512)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="sparse_categorical_crossentropy")
    model.fit(elastic.batches(), epochs=10, callbacks=[elastic], shuffle=False)

`Model.fit` keeps its epochs, callbacks, metrics and validation. The callback replaces the function that `fit` calls for
each batch: it takes the batch from the agent's loader, and makes a pass of the agent's. The update is that of torch's
or Optax' optimizer of the same name and options as Keras's, which the agent knows. They differ where SGD has a momentum
and the learning rate changes: Keras's momentum goes on at the old rate.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import default_collate

from pollux.errors import PolluxAgentError
from pollux.loop.session import Job, attach

try:
    import keras
except ImportError as missing:
    raise PolluxAgentError(
        "keras is not installed here: install it, or this package's extra `keras`"
    ) from missing

from pollux.integrations.keras_callbacks import CallbackStates, check_untouched

NAMES = {
    "SGD": {"momentum": ("momentum", "momentum"), "nesterov": ("nesterov", "nesterov")},
    "Adam": {"beta_1": ("", "b1"), "beta_2": ("", "b2"), "epsilon": ("eps", "eps")},
    "AdamW": {
        "beta_1": ("", "b1"),
        "beta_2": ("", "b2"),
        "epsilon": ("eps", "eps"),
        "weight_decay": ("weight_decay", "weight_decay"),
    },
}
"""Keras's optimizers that are translated, and the names of their options in torch and in Optax."""

_LAST = WeakKeyDictionary[Any, Any]()
"""Keras's optimizer -> that of its last `fit`, whose averages the next one goes on with."""

IGNORED = {"name", "learning_rate", "ema_momentum", "is_legacy_optimizer"}
"""Entries of an optimizer's configuration that have no effect, or are read apart."""


class Elastic(keras.callbacks.Callback):  # type: ignore[misc]
    """Lets the agent train in `Model.fit`. It must be the first of the callbacks.

    `dataset` is indexed; its items are (x, y) or (x, y, sample weight). `batch_size` is M0, over all ranks.
    `max_batch_size` and `per_gpu` bound what the agent may choose, as in `Job.loader`; `loader` has further options of
    it, and `attach` those of `pollux.attach`.

    Raises:
        PolluxAgentError: at the start of `fit`, for a backend or an optimizer that the agent cannot train with.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        max_batch_size: int | None = None,
        per_gpu: tuple[int, int] | None = None,
        loader: Mapping[str, Any] | None = None,
        attach: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._dataset, self._initial = dataset, batch_size
        self._loader = {"max_batch_size": max_batch_size, "per_gpu": per_gpu, **(loader or {})}
        self._attach = dict(attach or {})
        self._job: Job | None = None
        self._logs: dict[str, Any] = {}

    @property
    def job(self) -> Job:
        """The agent's job; raises PolluxAgentError before `fit` has begun."""
        if self._job is None:
            raise PolluxAgentError("expected training to have begun: the job is made by fit()")
        return self._job

    def batches(self) -> Iterator[Any]:
        """Yield what `fit` is given as data: one example, again and again, from which Keras builds the model."""
        example = tuple(part.numpy() for part in default_collate([self._dataset[0]]))
        while True:  # Keras takes generators, and no other iterators
            yield example

    # -- what fit calls ---------------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        model, backend = self.model, keras.config.backend()
        if backend not in ("torch", "jax"):
            raise PolluxAgentError(
                f'expected KERAS_BACKEND="torch" or "jax", got {backend!r}: the agent cannot read its gradients'
            )
        wrong = check_untouched(model, model.optimizer, self.params)
        if wrong:
            raise PolluxAgentError(f"expected a model of Keras's {wrong}")
        options = options_of(model.optimizer, backend)
        if backend == "torch":
            module: Any = model
            parameters = [variable.value for variable in model.trainable_variables]
            optimizer = getattr(torch.optim, type(model.optimizer).__name__)(parameters, **options)
            model.train_function = lambda data: self._pass(self._torch_loss)
        else:
            module, optimizer = self._in_jax(options)
            model.train_function = self._jax_pass
        if (before := _LAST.get(model.optimizer)) is not None:
            own = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict(before.state_dict() | {"param_groups": own})
        _LAST[model.optimizer] = optimizer
        # A rank that joins in place would begin in the middle of an epoch, which `fit` cannot.
        os.environ["POLLUX_RESIZE"] = "requeue"
        epochs = self.params["epochs"]
        self._callbacks = CallbackStates(epochs)
        job = self._job = attach(module, optimizer, **self._with_callbacks())
        self._callbacks.take(job.is_main)
        data = job.loader(self._dataset, self._initial, **self._loader)
        self._data, self._rate = data, optimizer.param_groups[0]
        if job.progress.optimizer_steps:
            model.optimizer.learning_rate = self._rate["lr"]  # what callbacks have made of it
        self._epochs = job.epochs(epochs)
        self._epoch = epochs if self._callbacks.ended else next(self._epochs, epochs)
        if self._epoch < epochs and job.stepper.epoch_done():  # stopped by a callback at the epoch's very end
            self._epoch = next(self._epochs, epochs)
        model._initial_epoch = self._epoch  # read after this call
        if backend == "jax":
            self._show()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._callbacks.put_back()
        if epoch > self._epoch:
            self._epoch = next(self._epochs)
        if keras.config.backend() == "jax":
            module: Any = self.job.module
            module.assign_state((self._variables()[1], self._metrics()))
        self._batches = iter(self._data)
        self._batch = next(self._batches)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            # Callbacks of Keras change it between epochs. The agent's factor comes on top.
            self._rate["lr"] = float(self.model.optimizer.learning_rate)

    def on_test_begin(self, logs: Any = None) -> None:
        """Evaluate with rank 0's moving averages: each rank has those of its own samples."""
        averages = [v for v in self.model.non_trainable_variables if keras.backend.is_float_dtype(v.dtype)]
        own = [keras.ops.convert_to_numpy(variable) for variable in averages]
        for variable, value in zip(averages, self.job.coordinator.exchange.gather(own)[0], strict=True):
            variable.assign(value)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._batch is None:  # the epoch is whole; later callbacks may stop the training
            self.model.stop_training = False

    def on_train_end(self, logs: Any = None) -> None:
        self._callbacks.put_back()
        if self.model.stop_training:
            self._callbacks.end()
            self._epochs.close()  # type: ignore[attr-defined]
            self.job.coordinator.finish()
        elif not self._callbacks.ended:
            next(self._epochs, None)
        self.job.close()

    def _with_callbacks(self) -> dict[str, Any]:
        """Return the arguments of `attach`, with the callbacks' state beside the script's."""
        given = self._attach.get("state")
        state = given if isinstance(given, dict) else {} if given is None else {"script": given}
        state["callbacks of keras"] = self._callbacks
        return {**self._attach, "state": state}

    # -- one pass ---------------------------------------------------------------------------------------------

    def _pass(self, loss: Any) -> dict[str, Any]:
        """Make one pass, and the optimizer step where it completes one. Return the metrics."""
        self.job.step(lambda: loss(*self._batch))
        following = next(self._batches, None)  # drains, saves and resizes
        if following is None:
            self.model.stop_training = True  # ends the epoch: see on_epoch_end
        self._batch = following
        return self._logs

    def _torch_loss(self, x: Any, y: Any, weight: Any = None) -> Any:
        model, device = self.model, self.job.device
        x, y, weight = (None if part is None else part.to(device) for part in (x, y, weight))
        predicted = self.job.model(x, training=True)
        loss = model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight, training=True)
        with torch.no_grad():
            model._loss_tracker.update_state(loss, sample_weight=len(x))
            self._logs = model.compute_metrics(x, y, predicted, sample_weight=weight)
        return loss

    # -- JAX --------------------------------------------------------------------------------------------------

    def _in_jax(self, options: Mapping[str, Any]) -> tuple[Any, Any]:
        import optax  # noqa: PLC0415 - of JAX' backend alone

        from pollux.integrations.jax import JaxModel, Optax  # noqa: PLC0415

        model = self.model

        def loss(params: Any, x: Any, y: Any, weight: Any = None, *, state: Any) -> Any:
            fixed, metrics = state
            scaled, (value, predicted, fixed, _) = model.compute_loss_and_updates(
                params, fixed, metrics, x, y, weight, training=True, optimizer_variables=[]
            )
            _, metrics = model._update_metrics_variables(metrics, value, x, y, predicted, weight)
            return scaled, (fixed, metrics)

        trained, fixed = self._variables()
        module = JaxModel(loss, trained, state=(fixed, self._metrics()))
        factory = getattr(optax, type(model.optimizer).__name__.lower())
        rest = {name: value for name, value in options.items() if name != "lr"}
        return module, Optax(module, factory, learning_rate=options["lr"], **rest)

    def _variables(self) -> tuple[list[Any], list[Any]]:
        """Trained and other variables of the model."""
        model = self.model
        return [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]

    def _metrics(self) -> list[Any]:
        return [variable.value for variable in self.model.metrics_variables]

    def _jax_pass(self, state: Any, _: Any) -> Any:
        module: Any = self.job.module
        self._pass(self.job.model)
        fixed, metrics = module.state
        with keras.StatelessScope(
            state_mapping=list(zip(self.model.metrics_variables, metrics, strict=True))
        ):
            logs = self.model.get_metrics_result()
        # `fit` gives the variables this state, even where something has asked for them during the pass.
        self.model._jax_state_synced = False
        return logs, (module.params, fixed, state[2], metrics)

    def _show(self) -> None:
        """Give Keras the restored variables."""
        module: Any = self.job.module
        trained, fixed = self.model.trainable_variables, self.model.non_trainable_variables
        for variable, value in zip([*trained, *fixed], [*module.params, *module.state[0]], strict=True):
            variable.assign(value)


def options_of(optimizer: Any, backend: str) -> dict[str, Any]:
    """Return the options of torch's or Optax' optimizer of the same name, with "lr".

    Raises PolluxAgentError for an optimizer or an option that is not translated.
    """
    name, given = type(optimizer).__name__, optimizer.get_config()
    if name not in NAMES:
        raise PolluxAgentError(f"expected one of Keras's optimizers {', '.join(NAMES)}, got {name}")
    if not isinstance(given["learning_rate"], float):
        raise PolluxAgentError(
            "expected a number as Keras's learning_rate, got a schedule: use keras.callbacks.LearningRateScheduler"
        )
    names = NAMES[name]
    others = [key for key, value in given.items() if value and key not in names and key not in IGNORED]
    if others:
        raise PolluxAgentError(f"expected keras.optimizers.{name} without {', '.join(others)}")
    found = {of[backend == "jax"]: given[key] for key, of in names.items() if of[backend == "jax"]}
    if backend == "torch" and "beta_1" in names:
        found["betas"] = (given["beta_1"], given["beta_2"])
    return found | {"lr": given["learning_rate"]}
