"""Train a residual network on drawn images: SGD; on a GPU in float16, with a GradScaler."""

import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import pollux
from contrib.examples.emulated import Accelerator, accuracy, arguments, finish
from tests.benchmarks.overhead import Residual

CUDA = torch.cuda.is_available()
SIZE, WIDTH, HELD_OUT = (32, 128, 4096) if CUDA else (16, 8, 1024)
NOISE = 3.0 * SIZE / 16
"""So much beside a class's pattern that the gradients are noisy to the end."""
STEPS = 64
"""Of an epoch, at M0."""

args = arguments(__doc__, epochs=12, batch_size=32, max_batch_size=512, lr=0.05)
device = torch.device("cuda" if CUDA else "cpu")
generator = torch.Generator().manual_seed(3)
patterns = torch.randn(10, 3, 8, 8, generator=generator)


def drawn(count: int) -> TensorDataset:
    """Return images [count, 3, SIZE, SIZE]: each is its class's pattern among noise."""
    y = torch.randint(10, (count,), generator=generator)
    x = nn.functional.interpolate(patterns[y], size=SIZE)
    return TensorDataset(x + NOISE * torch.randn(x.shape, generator=generator), y)


data, test = (
    drawn(STEPS * args.batch_size),
    TensorDataset(*(part.to(device) for part in drawn(HELD_OUT).tensors)),
)
model = Residual(WIDTH).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
scaler = torch.amp.GradScaler("cuda", enabled=CUDA)

job = pollux.attach(model, optimizer, scaler=scaler, seed=args.seed)
loader = job.loader(data, args.batch_size, max_batch_size=args.max_batch_size, per_gpu=args.per_gpu)
accelerator = Accelerator(args, job)


def loss_of(x: Tensor, y: Tensor) -> Tensor:
    accelerator.compute(len(y))
    with torch.autocast(device.type, torch.float16, enabled=CUDA):
        return cross_entropy(job.model(x.to(device)), y.to(device))


trained_s, curve = 0.0, []
for _ in job.epochs(args.epochs, statistical=True):
    began = time.monotonic()
    for x, y in loader:
        job.step(lambda x=x, y=y: loss_of(x, y))  # type: ignore[misc]
    trained_s += time.monotonic() - began
    curve.append((round(trained_s, 2), round(accuracy(job.module, test), 4)))
finish("images", args, job, test, curve=curve)
