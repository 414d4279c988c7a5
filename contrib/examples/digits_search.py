"""One trial of a search for digits, on an emulated accelerator: a learning rate and a width."""

from emulated import Accelerator, accuracy, arguments, digits, finish
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import pollux

args = arguments(__doc__, epochs=10, batch_size=32, max_batch_size=512, lr=0.05)
data = digits()
trial = pollux.trial(maximize=True)
lr = trial.suggest_float("lr", 1e-4, 1.0, log=True, default=args.lr)
width = trial.suggest_int("width", 4, 128, log=True)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

job = pollux.attach(model, SGD(model.parameters(), lr, momentum=0.9), seed=args.seed)
loader = job.loader(data.train, args.batch_size, max_batch_size=args.max_batch_size, per_gpu=args.per_gpu)
accelerator = Accelerator(args, job)
for _ in job.epochs(args.epochs, statistical=True):
    for x, y in loader:
        with job.micro_batch():
            accelerator.compute(len(y))
            job.backward(cross_entropy(job.model(x), y))
            accelerator.synchronise()
        if job.sync_gradients:
            job.optimizer.step()
            job.optimizer.zero_grad()
    trial.report(accuracy(job.module, data.test))
finish("digits-search", args, job, data.test)
