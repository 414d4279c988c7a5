"""Trainings of the demo's workload, built for tests."""

from __future__ import annotations

from contrib.demo.workload import Training


def training(**changes):
    base = {
        "name": "t",
        "script": "digits.py",
        "arrive_s": 0.0,
        "epochs": 10.0,
        "batch_size": 64,
        "max_batch_size": 2048,
        "per_gpu": (8, 128),
        "lr": 0.1,
        "alpha_s": 0.02,
        "beta_s": 0.002,
        "sync_local_s": 0.02,
        "sync_node_s": 0.06,
    }
    return Training(**(base | changes))
