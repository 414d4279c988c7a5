"""Train a small CNN on scikit-learn's digits: Adam, gradient clipping."""

from emulated import Accelerator, arguments, digits, finish
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam

import pollux

args = arguments(__doc__, epochs=20, batch_size=32, max_batch_size=256, lr=0.002)
data = digits()
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(128, 10)),
)
optimizer = Adam(model.parameters(), lr=args.lr)

job = pollux.attach(model, optimizer, seed=args.seed)
loader = job.loader(data.train, args.batch_size, max_batch_size=args.max_batch_size, per_gpu=args.per_gpu)
accelerator = Accelerator(args, job)
for _ in job.epochs(args.epochs, statistical=True):
    for x, y in loader:
        with job.micro_batch():
            accelerator.compute(len(y))
            job.backward(cross_entropy(job.model(x), y))
            accelerator.synchronise()
        if job.sync_gradients:
            clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
finish("digits-conv", args, job, data.test)
