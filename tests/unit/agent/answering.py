"""A stand-in for the publisher, which takes acknowledgements."""

from __future__ import annotations

import time
from typing import Any

from pollux import Job


class Line:
    """Notes the acknowledgements: (move, optimizer step)."""

    def __init__(self, *, accepts: bool = True) -> None:
        self.accepts = accepts
        self.heard: list[tuple[int, int]] = []

    def acknowledge(self, move: int, payload: dict[str, Any]) -> bool:
        self.heard.append((move, payload["step"]))
        return self.accepts

    def wake(self) -> None: ...

    def close(self) -> None: ...


def connected(job: Job, *, accepts: bool = True) -> Line:
    """Connect a job whose drained ranks wait for nobody."""
    line: Any = Line(accepts=accepts)
    job.coordinator.line.publisher, job.coordinator.drains.wait = line, 0.0
    return line  # type: ignore[no-any-return]


def heard(line: Line, count: int) -> list[tuple[int, int]]:
    """What came over the line, waited for: it is acknowledged in a thread."""
    deadline = time.monotonic() + 60
    while len(line.heard) < count:
        assert time.monotonic() < deadline, f"waited in vain for {count}, heard {line.heard}"
        time.sleep(0.005)
    return sorted(line.heard)
