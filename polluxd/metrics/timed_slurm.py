"""A Slurm client that times every request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from polluxd.errors import SlurmError, SlurmRefused, SlurmUnavailable
from polluxd.slurm.protocol import SlurmClient

from .declared import SLURM_CALLS, Metrics


class _TimedSlurm:
    """Passes each request on to `client`, and measures how long it takes and how it ends."""

    def __init__(self, client: SlurmClient, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._client, self._metrics, self._clock = client, metrics, clock

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        if name not in SLURM_CALLS:
            # can_shrink is answered from memory most of the time: its duration says nothing about Slurm.
            return call

        def timed(*arguments: Any, **options: Any) -> Any:
            began, result = self._clock(), "ok"
            try:
                return call(*arguments, **options)
            except SlurmError as error:
                kinds = {SlurmUnavailable: "unavailable", SlurmRefused: "refused"}
                result = next((kind for of, kind in kinds.items() if isinstance(error, of)), "garbled")
                raise
            finally:
                self._metrics.slurm_calls.labels(name, result).observe(self._clock() - began)

        return timed


def timed_slurm(
    client: SlurmClient, metrics: Metrics, clock: Callable[[], float] = time.perf_counter
) -> SlurmClient:
    """Return a client that measures the requests it passes on."""
    return cast(SlurmClient, _TimedSlurm(client, metrics, clock))
