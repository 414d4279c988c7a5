"""Share measurements between runs of the same training.

A fingerprint names runs with similar step times: the same script, model and per-GPU batch range. The database adds the
user and the GPU type. The measurements of an earlier run are the prior of this run. The prior counts where nothing is
measured yet, yields to measurements (`pollux.fit`), fades while unconfirmed, and is dropped as a whole once measured
times contradict it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pollux.goodput import BatchLimits, ThroughputParams
from pollux.slurm_job.access import GatewayAccess
from pollux.tuning.prior import Prior
from pollux.tuning.profile import StepProfile

logger = logging.getLogger("pollux")


def fingerprint(model: Any, limits: BatchLimits, argv: list[str] | None = None) -> str:
    """Return 32 hexadecimal digits, equal for runs with similar step times.

    Such runs have the script's file name, the model's shapes and the range of per-GPU batches in common: users edit
    scripts, and run them from other folders. Arguments that change step times change the shapes, or are refuted.
    """
    script = os.path.basename((sys.argv if argv is None else argv)[0])
    facts = [script, limits.local_min, limits.local_max, list(_shapes(model))]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _shapes(model: Any) -> Iterable[tuple[str, list[int], str, bool]]:
    for name, parameter in model.named_parameters():
        yield name, list(parameter.shape), str(parameter.dtype), bool(parameter.requires_grad)


def gpu_type(device: Any, access: GatewayAccess | None) -> str:
    """The GPU type that step times belong to; empty for a CPU.

    Slurm's name of it where `pollux run` knows it, else the device's own.
    """
    if access is not None and access.grant is not None and access.grant.gpu_type:
        return access.grant.gpu_type
    if device.type != "cuda":
        return ""
    import torch  # noqa: PLC0415 - only a training that has torch has such a device

    return str(torch.cuda.get_device_name(device))[:64]


@dataclass(frozen=True, slots=True)
class Introduction:
    """The training's fingerprint, and the receiver of earlier measurements."""

    fingerprint: str
    gpu_type: str
    learn: Callable[[Any], None]
    """Called once with the gateway's answer, in the reporter's thread."""


def introduction(
    model: Any, limits: BatchLimits, profile: StepProfile, environ: Mapping[str, str] = os.environ
) -> Introduction | None:
    """Return a training's introduction; the answer goes into its profile. None with `#POLLUX prior=no`."""
    if environ.get("POLLUX_PRIOR", "").strip().lower() in ("no", "false", "0", "off"):
        return None

    def learn(answer: Any) -> None:
        prior = Prior.from_answer(answer)
        if prior is not None:
            profile.learn(prior)
            logger.info("earlier runs have measured up to %d GPUs: begun with their fit", prior.gpus)

    return Introduction(fingerprint(model, limits), profile.gpu_type, learn)


@dataclass(frozen=True)
class LastAttempt:
    """The previous attempt's search for a batch size."""

    batch_size: int
    """Total batch size in use."""
    params: ThroughputParams | None
    """The throughput model as last fitted."""
    gpus: int = 0
    """Ranks that it had; 0 where not known."""


def usable_params(known: LastAttempt | None, profile: StepProfile) -> ThroughputParams | None:
    """The previous attempt's fit, where measured on GPUs of this type."""
    return None if known is None or profile.of_other_type else known.params
