"""A Slurm client that times every request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from polluxd.errors import SlurmError, SlurmRefused, SlurmUnavailable
from polluxd.slurm.protocol import ClusterState, Geometry, SlurmClient, SlurmJob

from .declared import Metrics


class TimedSlurm:
    """Passes each request on to `client`, and measures it.

    `metrics` hears how long the request took and how it ended.
    """

    def __init__(
        self, client: SlurmClient, metrics: Metrics, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._clock = clock

    @contextmanager
    def _timed(self, call: str) -> Iterator[None]:
        began, result = self._clock(), "ok"
        try:
            yield
        except SlurmUnavailable:
            result = "unavailable"
            raise
        except SlurmRefused:
            result = "refused"
            raise
        except SlurmError:
            result = "garbled"
            raise
        finally:
            self._metrics.slurm_calls.labels(call, result).observe(self._clock() - began)

    def observe(self) -> ClusterState:
        with self._timed("observe"):
            return self._client.observe()

    def jobs(self, job_ids: Sequence[int]) -> dict[int, SlurmJob]:
        with self._timed("jobs"):
            return self._client.jobs(job_ids)

    def requeue(self, job_id: int) -> None:
        with self._timed("requeue"):
            self._client.requeue(job_id)

    def run_again(self, job_id: int) -> None:
        with self._timed("run_again"):
            self._client.run_again(job_id)

    def configure(
        self, job_id: int, geometry: Geometry, *, start: bool, time_limit_s: float | None = None
    ) -> None:
        with self._timed("configure"):
            self._client.configure(job_id, geometry, start=start, time_limit_s=time_limit_s)

    def release(self, job_id: int) -> None:
        with self._timed("release"):
            self._client.release(job_id)

    def limit_time(self, job_id: int, seconds: float) -> None:
        with self._timed("limit_time"):
            self._client.limit_time(job_id, seconds)

    def can_shrink(self) -> bool:
        # Answered from memory most of the time: its duration says nothing about Slurm.
        return self._client.can_shrink()

    def shrink(self, job_id: int, nodes: Sequence[str]) -> None:
        with self._timed("shrink"):
            self._client.shrink(job_id, nodes)

    def cancel(self, job_ids: Sequence[int]) -> None:
        with self._timed("cancel"):
            self._client.cancel(job_ids)

    def renew(self, job_ids: Sequence[int], until: float) -> None:
        with self._timed("renew"):
            self._client.renew(job_ids, until)
