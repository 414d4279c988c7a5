"""Compare the agent's gradient noise scale with one from the gradients of all single examples."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import pollux
from pollux.private_folder import write_named

EXAMPLES, M0, STEPS = 4096, 64, 256
"""A batch is drawn without replacement; of so many examples this matters little."""
SEEDS = range(3)


def compared(device: torch.device, seed: int) -> dict[str, float]:
    """Train with a learning rate of 0: the noise scale is that of the initial weights at each step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    x = torch.randn(EXAMPLES, 8)
    y = (x @ torch.randn(8, 4) + torch.randn(EXAMPLES, 4)).argmax(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    job = pollux.attach(
        model, optimizer, adaptive=False, measuring={"every": 1, "decay": 1 - 1e-9}, name=f"s{seed}"
    )
    loader = job.loader(TensorDataset(x, y), M0)
    for _ in job.epochs(STEPS * M0 / EXAMPLES):
        for a, b in loader:
            job.step(lambda a=a, b=b: cross_entropy(job.model(a.to(device)), b.to(device)))  # type: ignore[misc]
    job.close()
    if job.noise_scale is None:
        raise RuntimeError(f"no noise scale after {job.progress.optimizer_steps} steps")
    phi, error = direct(job.module, x.to(device), y.to(device), job.world.size)
    return {"measured": job.noise_scale.phi(M0), "direct": phi, "standard_error": error}


def direct(model: nn.Module, x: Tensor, y: Tensor, ranks: int) -> tuple[float, float]:
    """Return tr(Sigma) / |g|^2 [examples], and the relative standard error of an estimate of it.

    The estimate is the one of STEPS steps of M0 examples, each on so many ranks (McCandlish et al., 2018, A.1).
    """

    def loss(parameters: Any, one: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(torch.func.functional_call(model, parameters, (one[None],)), target[None])

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    flat = torch.cat([g.reshape(len(x), -1) for g in each.values()], 1).double()
    mean, covariance = flat.mean(0), flat.T.cov()
    sqr, trace = float(mean @ mean), float(covariance.trace())
    part = covariance * (ranks / M0)  # of one rank's gradient
    spread = 2 * float(part.square().sum())
    sqr_error = ((4 * float(mean @ part @ mean) / ranks + spread / (ranks * (ranks - 1))) / STEPS) ** 0.5
    trace_error = (spread / (ranks - 1) / STEPS) ** 0.5 * M0 / ranks
    return trace / sqr, ((sqr_error / sqr) ** 2 + (trace_error / trace) ** 2) ** 0.5


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    found = [compared(torch.device("cuda" if torch.cuda.is_available() else "cpu"), s) for s in SEEDS]
    write_named(options.result, json.dumps(found))
