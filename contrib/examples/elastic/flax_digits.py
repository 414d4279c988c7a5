"""Classify digits with Flax NNX and Optax on any number of devices."""

import sys

import jax
import numpy as np
import optax
import torch
from flax import nnx
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import pollux
from pollux.integrations.jax import JaxModel, Optax

EPOCHS, BATCH = int(sys.argv[1]) if sys.argv[1:] else 20, 32

images, labels = load_digits(return_X_y=True)
x, y = np.float32(images / 16), np.int32(labels)


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden, self.out = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(x)))


graph, params = nnx.split(Network(nnx.Rngs(0)))


def loss(params: nnx.State, x: jax.Array, y: jax.Array) -> jax.Array:
    logits = nnx.merge(graph, params)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


model = JaxModel(loss, params)
optimizer = Optax(model, optax.adam, learning_rate=1e-3)

job = pollux.attach(model, optimizer)
loader = job.loader(TensorDataset(*map(torch.from_numpy, (x[:1400], y[:1400]))), BATCH, max_batch_size=512)
for _ in job.epochs(EPOCHS):
    for images, labels in loader:
        job.step(lambda images=images, labels=labels: job.model(images, labels))
if job.is_main:
    accuracy = (nnx.merge(graph, model.params)(x[1400:]).argmax(1) == y[1400:]).mean()
    print(f"accuracy {accuracy:.3f}")
