"""Reports that come within a fifth of a second are one statement."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from functools import partial

from polluxd.errors import StoreRejected

from .records import Records, Refusal, SentReport

_EVERY_S = 0.2
_AT_ONCE = 200
"""Reports of one statement."""


class ReportBatches:
    """Collects reports, and stores them; the database is asked in one of `threads`."""

    def __init__(self, records: Records, threads: Executor) -> None:
        self._records = records
        self._threads = threads
        self._waiting: list[tuple[SentReport, asyncio.Future[Refusal | None]]] = []
        self._storing: asyncio.Task[None] | None = None

    async def store(self, report: SentReport) -> Refusal | None:
        """Store a report; return why not. Raises StoreError."""
        answer: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((report, answer))
        if self._storing is None or self._storing.done():
            self._storing = asyncio.create_task(self._store_all())
        return await answer

    async def _store_all(self) -> None:
        while self._waiting:
            await asyncio.sleep(_EVERY_S)
            batch, self._waiting = self._waiting[:_AT_ONCE], self._waiting[_AT_ONCE:]
            try:
                await self._store(batch)
            except StoreRejected:
                # No report may cost another user's one.
                for each in batch:
                    try:
                        await self._store([each])
                    except Exception as error:
                        _fail([each], error)
            except Exception as error:
                _fail(batch, error)

    async def _store(self, batch: list[tuple[SentReport, asyncio.Future[Refusal | None]]]) -> None:
        call = partial(self._records.store_reports, [report for report, _ in batch])
        refusals = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        for (_, answer), refusal in zip(batch, refusals, strict=True):
            if not answer.done():
                answer.set_result(refusal)


def _fail(batch: list[tuple[SentReport, asyncio.Future[Refusal | None]]], error: Exception) -> None:
    for _, answer in batch:
        if not answer.done():
            answer.set_exception(error)
