"""Orders for agents that wait: one query for all, several times a second.

While nobody waits, nothing is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import Collection, Mapping
from concurrent.futures import Executor

from polluxd.errors import PolluxError

from .http_errors import HttpRefusal, of_attempt, unavailable
from .payloads import OrdersAnswer, Resize
from .records import Holder, Orders, Records

log = logging.getLogger(__name__)

EVERY_S = 0.2
"""Time between two looks."""
LONGEST_S = 50.0
"""Longest wait of a question."""
_FRESH_S = 2.0
"""Age up to which the state of the database is believed."""
_DATABASE_S = 5.0
"""Longest wait for the first look."""


def answer_of(orders: Orders | None, attempt: int) -> OrdersAnswer:
    """Return the orders of an attempt, with their digest."""
    mine = orders if orders is not None and orders.attempt == attempt else Orders(attempt, None, None)
    text = json.dumps([mine.drain, mine.resize], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    resize = None if mine.resize is None else Resize(**mine.resize)
    return OrdersAnswer(seen=digest, drain=mine.drain, resize=resize)


class _Waiter:
    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.woken = asyncio.Event()
        self.superseded = False
        self.over = False


class OrderWatch:
    """Looks for orders as long as somebody waits for some; of `threads`, one suffices to ask the database."""

    def __init__(self, records: Records, threads: Executor) -> None:
        self._records = records
        self._threads = threads
        self._orders: Mapping[int, Orders] = {}
        self._waiting: dict[str, _Waiter] = {}
        """By token: a newer question takes the place of the older one."""
        self._new: list[_Waiter] = []
        """Those that came after the last look began."""
        self._by_job: dict[int, set[_Waiter]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._sound, self._asked_at = False, float("-inf")

    async def orders(self, holder: Holder, token: str, seen: str) -> OrdersAnswer:
        """Return the orders once they are not those `seen`, or after LONGEST_S.

        Raises HttpRefusal: a newer question of the same token came, the attempt is over, or the database is away.
        """
        job = holder.job_id
        assert job is not None
        mine = _Waiter(holder)
        if (former := self._waiting.get(token)) is not None:
            former.superseded = True
            former.woken.set()
        self._waiting[token] = mine
        self._new.append(mine)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        self._by_job.setdefault(job, set()).add(mine)
        try:
            try:
                async with asyncio.timeout(_DATABASE_S):
                    await mine.woken.wait()
            except TimeoutError:
                raise unavailable("the database does not answer: try again") from None
            if mine.over:
                raise of_attempt("over")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_S):
                    while not mine.superseded and self._answer(holder, job).seen == seen:
                        mine.woken.clear()
                        await mine.woken.wait()
            if mine.superseded:
                raise HttpRefusal(409, "superseded", "a newer question of this token waits")
            return self._answer(holder, job)
        finally:
            if self._waiting.get(token) is mine:
                del self._waiting[token]
            self._by_job[job].discard(mine)
            if not self._by_job[job]:
                del self._by_job[job]

    def _answer(self, holder: Holder, job: int) -> OrdersAnswer:
        return answer_of(self._orders.get(job), holder.attempt)

    async def _look(self) -> None:
        trouble = False
        while self._waiting:
            new, self._new = self._new, []
            try:
                found, over = await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._ask, [waiter.holder for waiter in new]
                )
            except PolluxError as error:
                self._new += new
                if not trouble:
                    log.warning("orders cannot be read: %s", error)
                trouble = True
            else:
                trouble = False
                for waiter in new:
                    waiter.over = waiter.holder in over
                before, self._orders = self._orders, found
                changed = [job for job in before.keys() | found.keys() if before.get(job) != found.get(job)]
                for waiter in new + [each for job in changed for each in self._by_job.get(job, ())]:
                    waiter.woken.set()
            await asyncio.sleep(EVERY_S)
        self._new.clear()

    def _ask(self, holders: list[Holder]) -> tuple[Mapping[int, Orders], Collection[Holder]]:
        """Return the open orders, and which of the holders have an attempt that is over."""
        return self._records.open_orders(), self._records.over(holders) if holders else ()

    async def database(self) -> bool:
        """Say whether the database answered in the last seconds."""
        loop = asyncio.get_running_loop()
        if loop.time() > self._asked_at + _FRESH_S:
            self._asked_at = loop.time()
            try:
                await loop.run_in_executor(self._threads, self._records.open_orders)
            except PolluxError:
                self._sound = False
            else:
                self._sound = True
        return self._sound
