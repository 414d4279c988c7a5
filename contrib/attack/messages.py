"""What the gateway is told, and what it and Postgres answer, by way of the hands."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """The gateway's answer to one request of a user."""

    status: int
    """Of HTTP; 0: there was no answer."""
    document: Any
    seconds: float

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """The answer without any token."""
        document = self.document
        if isinstance(document, dict):
            document = {name: value for name, value in document.items() if name != "token"}
        return f"{self.status} {json.dumps(document)}"[:200]


@dataclass(frozen=True, slots=True)
class Result:
    """What a statement, or a login, in Postgres came to."""

    ok: bool
    text: str


Request = tuple[str, str, Any]
"""Method, path, document."""


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
        **changes,
    }
