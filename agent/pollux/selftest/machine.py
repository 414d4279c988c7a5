"""The devices of this machine, and how many ranks a check runs on them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
SHARES_FROM = (2, 30)
"""NCCL's first release that lets several ranks use one GPU, where SHARED_GPU is 1."""

MOST_RANKS = 8


@dataclass(frozen=True)
class Machine:
    """Where the checks run."""

    name: str
    gpus: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES names them; empty: CPU."""
    shared_gpus: tuple[str, ...]
    """GPUs of the checks that need several ranks; empty: these run on the CPU."""
    ranks: int
    """Of such a check; even."""
    nccl: str = ""
    notes: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of all ranks."""

    @property
    def shared_device(self) -> str:
        """Device of the checks that need several ranks."""
        return "cuda" if self.shared_gpus else "cpu"

    @property
    def backend(self) -> str:
        return "nccl" if self.shared_gpus else "gloo"


def this_machine(device: str | None = None) -> Machine:
    """Look at the GPUs that this process may use. `device`: "cpu" uses none of them."""
    import torch  # noqa: PLC0415 - `--help` needs none of it

    count = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if not count:
        return Machine(
            f"CPU, {os.cpu_count()} cores",
            (),
            (),
            2,
            notes=("No GPU is used: all ranks run on the CPU, over gloo. Nothing here tests CUDA or NCCL.",),
        )
    listed = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    gpus = tuple(part.strip() for part in listed.split(","))[:count]
    return of_gpus(torch.cuda.get_device_name(0), gpus, nccl_release())


def nccl_release() -> tuple[int, ...]:
    """Return the release of NCCL that is loaded. It need not be the one that torch was built with."""
    import torch  # noqa: PLC0415 - as above

    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))  # torch has loaded it
    except (OSError, AttributeError):
        return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def of_gpus(name: str, gpus: tuple[str, ...], nccl: tuple[int, ...]) -> Machine:
    """Return the machine that has these GPUs and this release of NCCL."""
    release = ".".join(map(str, nccl))
    title = f"{len(gpus)} x {name}"
    if len(gpus) > 1:
        ranks = min(len(gpus), MOST_RANKS) // 2 * 2
        return Machine(title, gpus, gpus[:ranks], ranks, release)
    if nccl[:2] >= SHARES_FROM:
        note = f"One GPU: two ranks share it ({SHARED_GPU}=1). Their step times say nothing of two GPUs."
        return Machine(title, gpus, gpus, 2, release, (note,), {SHARED_GPU: "1"})
    note = (
        f"One GPU, and NCCL {release} lets no two ranks share it ({SHARES_FROM[0]}.{SHARES_FROM[1]} does): what needs "
        "several ranks runs on the CPU, over gloo."
    )
    return Machine(title, gpus, (), 2, release, (note,))
