"""Reports as agents make them."""

from __future__ import annotations

import time
from typing import Any


def payload(**changes: Any) -> dict[str, Any]:
    """A sound report; `changes` replace members."""
    return {
        "v": 1,
        "at": time.time(),
        "params": dict.fromkeys(
            ("alpha_grad", "beta_grad", "alpha_local", "beta_local", "alpha_node", "beta_node"), 0.01
        )
        | {"gamma": 1.5},
        "noise": {"sqr": 2.0, "var": 6.0},
        "limits": {"initial": 32, "maximum": 1024, "local_min": 8, "local_max": 256},
        **{"explored_gpus": 4, "explored_nodes": 1, "gpus": 4, "nodes": 1},
        **{"batch_size": 128, "local_batch": 32, "accumulation": 0},
        **{"goodput": 90.0, "throughput": 100.0, "progress": 10.0, "target": 500.0, "epoch": 1.5},
        **{"lr_factor": 2.0, "gain": 1.9, "optimizer_steps": 12, "checkpointed": False},
        "times": {"launched_at": time.time() - 5, "first_step_at": None},
        **changes,
    }
