"""Train a small perceptron with dropout on scikit-learn's tumours.

AdamW trains it at two learning rates. The data are scikit-learn's breast cancer table.
"""

from emulated import Accelerator, arguments, finish, tumours
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

import pollux

args = arguments(__doc__, epochs=60, batch_size=16, max_batch_size=128, lr=0.003)
data = tumours()
model = nn.Sequential(
    nn.Linear(30, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2)
)
groups = [{"params": model[:-1].parameters()}, {"params": model[-1].parameters(), "lr": args.lr / 2}]
optimizer = AdamW(groups, lr=args.lr, weight_decay=0.01)

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
            optimizer.step()
            optimizer.zero_grad()
finish("tumours-mlp", args, job, data.test)
