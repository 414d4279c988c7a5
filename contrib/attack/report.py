"""The report of a job that trains soundly."""

from __future__ import annotations

import time
from typing import Any


def report(**changes: Any) -> dict[str, Any]:
    """Return a sound report; `changes` replace members."""
    now = time.time()
    terms = ("alpha_grad", "beta_grad", "alpha_local", "beta_local", "alpha_node", "beta_node")
    return {
        "v": 1,
        "at": now,
        "params": dict.fromkeys(terms, 0.01) | {"gamma": 1.5},
        "noise": {"sqr": 2.0, "var": 6.0},
        "limits": {"initial": 32, "maximum": 1024, "local_min": 8, "local_max": 256},
        **{"explored_gpus": 1, "explored_nodes": 1, "gpus": 1, "nodes": 1},
        **{"batch_size": 128, "local_batch": 32, "accumulation": 0},
        **{"goodput": 90.0, "throughput": 100.0, "progress": 10.0, "target": 500.0, "epoch": 1.5},
        **{"lr_factor": 2.0, "gain": 1.9, "optimizer_steps": 12, "checkpointed": False},
        "times": {"launched_at": now - 5, "first_step_at": now - 4},
        "restart_cost": None,
        **changes,
    }
