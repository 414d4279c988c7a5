"""Records as the pyslurm worker sends them."""

from __future__ import annotations

from typing import Any

JOB: dict[str, Any] = {
    "id": 7,
    "name": "train",
    "user": "alice",
    "uid": 1000,
    "account": "vision",
    "partition": "main",
    "qos": None,
    "state": "RUNNING",
    "reason": None,
    "restarts": 1,
    "submitted": 1795271832,
    "eligible": 1795271833,
    "started": 1795271833,
    "ends": 1826807833,
    "limit": 60,
    "nodes": "n[3-4]",
    "batch_host": "n3",
    "held": {
        "n3": {"cpu_ids": "0-1", "threads": 2, "gres": ["gpu:a100:4", "nic:1"]},
        "n4": {"cpu_ids": "6", "threads": 1, "gres": ["gpu:a100:4"]},
    },
    "gres_per_node": ["gres/gpu:a100:4"],
    "gpus_otherwise": False,
    "on_hold": False,
    "dependent": False,
    "priority": 4294901757,
    "planned_nodes": None,
    "licenses": [],
    "tres": {"cpu": 6, "node": 2, "billing": 6, "gres/gpu": 8},
    "array": None,
    "array_task": None,
    "array_waiting": None,
    "admin_comment": "pollux:v1 min-gpus=1 max-gpus=8 submitted=1795271000",
}


NODE = {"name": "n3", "state": "MIXED", "gres": ["gpu:a100:4"], "cpus": 8, "partitions": ["main"]}
