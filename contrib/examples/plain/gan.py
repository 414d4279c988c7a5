"""Train a generator against a critic: points on a circle."""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as judge
from torch.utils.data import DataLoader, TensorDataset

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
loader = DataLoader(points, BATCH, shuffle=True)
for epoch in range(EPOCHS):
    for (batch,) in loader:
        real = batch.to(device)
        fake = generator(torch.randn(len(real), 8, device=device))
        (against(critic(real), 1.0) + against(critic(fake.detach()), 0.0)).backward()
        judging.step()
        judging.zero_grad()
        against(critic(fake), 1.0).backward()
        generating.step()
        generating.zero_grad()
        judging.zero_grad()
    radius = fake.detach().norm(dim=1).mean()
    print(f"epoch {epoch}: mean radius {float(radius):.3f}")
