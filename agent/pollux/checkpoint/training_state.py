"""Random numbers and finiteness of a training, for its checkpoints."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from pollux.ranks.sharding import local_part


class Stateful(Protocol):
    """Two methods, as torch's modules, optimizers and schedulers have them."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def rng_state(device: torch.device) -> dict[str, Any]:
    """This rank's random number generators: torch's, numpy's, Python's."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            position,
            has_gauss,
            cached,
        ],
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put back what `rng_state` took."""
    torch.set_rng_state(state["torch"].cpu())
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def restore_rng(
    states: Sequence[Mapping[str, Any]], rank: int, seed: int, step: int, device: torch.device
) -> None:
    """This rank's generators as they were. A rank that did not exist then gets its own from seed, step and rank."""
    if rank < len(states):
        set_rng_state(states[rank], device)
        return
    _seed(seed, step, rank)


def tell_ranks_apart(rank: int, seed: int) -> None:
    """At the start: give each rank beyond the first its own random numbers.

    Scripts give all ranks the same seed, so that their initial weights are equal. In the training, equal random numbers
    would give different examples the same dropout masks.
    """
    if rank:
        _seed(seed, torch.initial_seed(), rank)


def is_finite(model: torch.nn.Module) -> bool:
    """Whether all of this rank's parameters are finite. Waits for the device once."""
    parts = [local_part(p.detach()) for p in model.parameters() if p.is_floating_point()]
    parts = [part for part in parts if part.numel()]
    if not parts:
        return True
    # A fifth of the time of an infinity norm on a CPU. No release of torch finds extremes of 8-bit floats.
    wide = (part if part.itemsize > 1 else part.float() for part in parts)
    extremes = torch.stack([extreme.float() for part in wide for extreme in torch.aminmax(part)])
    return bool(extremes.isfinite().all())


def _seed(*numbers: int) -> None:
    words = np.random.SeedSequence([n & (2**64 - 1) for n in numbers]).generate_state(3, np.uint64)
    torch.manual_seed(int(words[0]) >> 1)
    np.random.seed(int(words[1]) & 0xFFFFFFFF)
    random.seed(int(words[2]))
