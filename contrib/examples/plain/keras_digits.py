"""Classify digits with Keras on one device."""

import sys

import keras
import numpy as np
from sklearn.datasets import load_digits

EPOCHS, BATCH = int(sys.argv[1]) if sys.argv[1:] else 20, 32

images, labels = load_digits(return_X_y=True)
x, y = np.float32(images / 16), np.int32(labels)

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.layers.Input((64,)),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(10),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(1e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

model.fit(x[:1400], y[:1400], batch_size=BATCH, epochs=EPOCHS, verbose=0)
_, accuracy = model.evaluate(x[1400:], y[1400:], verbose=0)
print(f"accuracy {accuracy:.3f}")
