"""Train a LightningModule: digits, with validation."""

import sys

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from pollux.integrations.lightning import ElasticStrategy

EPOCHS, BATCH = int(sys.argv[1]) if sys.argv[1:] else 20, 32


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return cross_entropy(self.layers(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        accuracy = (self.layers(x).argmax(1) == y).float().mean()
        self.log("accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


lightning.seed_everything(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
train, validation = random_split(TensorDataset(x, y), [0.8, 0.2])
trainer = lightning.Trainer(
    max_epochs=EPOCHS,
    strategy=ElasticStrategy(max_batch_size=512, per_gpu=(8, 256)),
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Digits(), DataLoader(train, BATCH, shuffle=True), DataLoader(validation, 256))
for name, value in trainer.callback_metrics.items():
    print(f"{name} {float(value):.3f}")
