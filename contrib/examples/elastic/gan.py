"""Train a generator against a critic: points on a circle."""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as judge
from torch.utils.data import TensorDataset

import pollux

EPOCHS, BATCH = int(sys.argv[1]) if sys.argv[1:] else 40, 32

torch.manual_seed(0)
angle = 2 * torch.pi * torch.rand(2048)
points = TensorDataset(torch.stack([angle.cos(), angle.sin()], 1))
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def network(inputs: int, outputs: int) -> nn.Module:
    layers = nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2)
    return nn.Sequential(*layers, nn.Linear(64, outputs)).to(device)


def against(answers: Tensor, truth: float) -> Tensor:
    return judge(answers, torch.full_like(answers, truth))


generator, critic = network(8, 2), network(2, 1)
generating = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
judging = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
job = pollux.attach(generator, generating)
other = job.add_model("critic", critic, judging)
loader = job.loader(points, BATCH, max_batch_size=256, per_gpu=(8, 128))
for epoch in job.epochs(EPOCHS):
    for (batch,) in loader:
        real = batch.to(device)
        fake = generator(torch.randn(len(real), 8, device=device)).detach()
        with other.micro_batch():
            # One pass: DistributedDataParallel allows no second one before the backward pass.
            answers = other.model(torch.cat([real, fake]))
            other.backward(against(answers[: len(real)], 1.0) + against(answers[len(real) :], 0.0))
        with job.micro_batch():
            fake = job.model(torch.randn(len(real), 8, device=device))
            for p in critic.parameters():
                p.requires_grad_(False)
            job.backward(against(other.module(fake), 1.0))
            for p in critic.parameters():
                p.requires_grad_(True)
        if job.sync_gradients:
            judging.step()
            generating.step()
            judging.zero_grad()
            generating.zero_grad()
    radius = fake.detach().norm(dim=1).mean()
    if job.is_main:
        print(f"epoch {epoch}: mean radius {float(radius):.3f}")
