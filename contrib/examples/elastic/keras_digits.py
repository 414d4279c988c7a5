"""Classify digits with Keras on any number of devices, by a callback."""

import sys

import keras
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from pollux.integrations.keras import Elastic

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

data = TensorDataset(*map(torch.from_numpy, (x[:1400], y[:1400])))
elastic = Elastic(data, BATCH, max_batch_size=512)
model.fit(elastic.batches(), epochs=EPOCHS, callbacks=[elastic], shuffle=False, verbose=0)
if elastic.job.is_main:
    _, accuracy = model.evaluate(x[1400:], y[1400:], verbose=0)
    print(f"accuracy {accuracy:.3f}")
