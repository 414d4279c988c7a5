"""Classify digits with Flax NNX and Optax on one device."""

import sys

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

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


optimizer = optax.adam(learning_rate=1e-3)
state = optimizer.init(params)


@jax.jit
def step(params: nnx.State, state: optax.OptState, x: jax.Array, y: jax.Array) -> tuple:
    gradient = jax.grad(loss)(params, x, y)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state


shuffled = np.random.default_rng(0)
for _ in range(EPOCHS):
    for batch in np.array_split(shuffled.permutation(1400), 1400 // BATCH):
        params, state = step(params, state, x[batch], y[batch])
accuracy = (nnx.merge(graph, params)(x[1400:]).argmax(1) == y[1400:]).mean()
print(f"accuracy {accuracy:.3f}")
