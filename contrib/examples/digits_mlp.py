"""Train a perceptron on scikit-learn's digits by SGD with momentum.

The perceptron has several layers.
"""

from emulated import Accelerator, arguments, digits, finish
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

import pollux

args = arguments(__doc__, epochs=30, batch_size=32, max_batch_size=512, lr=0.05)
data = digits()
model = nn.Sequential(
    nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
)
optimizer = SGD(model.parameters(), lr=args.lr, momentum=0.9)
# Written for steps of M0 examples; larger batches advance it by what they are worth.
scheduler = CosineAnnealingLR(
    optimizer, T_max=int(args.epochs * len(data.train) / args.batch_size), eta_min=args.lr / 100
)

job = pollux.attach(model, optimizer, scheduler, seed=args.seed)
loader = job.loader(data.train, args.batch_size, max_batch_size=args.max_batch_size, per_gpu=args.per_gpu)
accelerator = Accelerator(args, job)
for _ in job.epochs(args.epochs, statistical=True):
    for x, y in loader:
        with job.micro_batch():
            accelerator.compute(len(y))
            job.backward(cross_entropy(job.model(x), y))
            accelerator.synchronise()
        if job.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()
            if scheduler.last_epoch < scheduler.T_max:
                scheduler.step()
finish("digits-mlp", args, job, data.test)
