"""Who asks: a munge credential gives a token, which opens all else.

Tokens are random. The database has their SHA-256; each gateway remembers those that it has seen for five minutes, so
that most requests cost no look-up. Every statement asks again whether the attempt still runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from pydantic import ValidationError

from pollux.scheduler.munge import MungeError

from .budgets import Pace, Turns
from .http_errors import HttpRefusal, not_sensible, of_attempt, token_refused, too_often
from .payloads import AttemptCredential, TokenAnswer, TokenRequest, UserCredential
from .records import Holder, Records
from .visitors import Visitor

USER_S = 600.0
"""Life of a user's token."""
_REMEMBERED_S = 300.0
_REMEMBERED = 50_000
_PAYLOAD = 1024
"""Bytes of a credential's content: packed, 2 kB hold a megabyte, which would be read for 0.1 s."""
_TEXT = re.compile(r"J\.[1-9]\d{0,9}\.\d{1,10}\.[\w-]{43}|U\.\d{1,10}\.[\w-]{43}", re.ASCII)


class Decoder(Protocol):
    """munged, as the gateway needs it."""

    def decode(self, credential: bytes) -> tuple[bytes, int]: ...


class Tokens:
    """Gives tokens out, and recognises them.

    Args:
        cluster: ClusterName of slurm.conf.
        threads: where the database is asked for users that munge has named. Credentials and unknown tokens have one
            thread each.
        interval_s: time between two reports [s].
    """

    def __init__(
        self, records: Records, munge: Decoder, cluster: str, threads: Executor, *, interval_s: float
    ) -> None:
        self._records = records
        self._munge = munge
        self._cluster = cluster
        self._threads = threads
        self._interval_s = interval_s
        self._known: OrderedDict[bytes, tuple[Holder, float, float]] = OrderedDict()
        """Holder, until when it is believed, and until when it lives, by hash."""
        self._unknown: OrderedDict[bytes, float] = OrderedDict()
        self._looked_up, self._decoded = Turns(1, 4096), Turns(1, 4096)
        """Tokens and credentials, by name of the client: one of each waits for the thread."""
        self._looking = ThreadPoolExecutor(1, thread_name_prefix="pollux-token")
        self._decoding = ThreadPoolExecutor(1, thread_name_prefix="pollux-credential")
        self._of_user = Pace(2, 60)
        """Tokens given out, by user."""

    async def issue(self, request: TokenRequest, client: Visitor) -> tuple[TokenAnswer, Holder]:
        """Return a token for a credential's maker. Raises Refused, StoreError."""
        async with self._decoded.turn(client.name):
            client.checked = True  # it does not give way to strangers now
            try:
                decode = partial(self._munge.decode, request.credential.encode())
                payload, uid = await self._run(decode, self._decoding)
            except MungeError as error:
                raise token_refused(str(error)) from None
        if not self._of_user.take(uid):
            raise too_often("you ask for too many tokens: use those that you have")
        credential = _credential(payload)
        secret = secrets.token_urlsafe(32)
        if isinstance(credential, UserCredential):
            holder, text = Holder(uid, expires_s=USER_S), f"U.{uid}.{secret}"
        else:
            await self._check(credential, uid)
            holder = Holder(uid, credential.job, credential.attempt)
            text = f"J.{credential.job}.{credential.attempt}.{secret}"
        digest = hashlib.sha256(text.encode()).digest()
        await self._run(partial(self._records.issue, holder, digest))
        self._remember(digest, holder)
        answer = TokenAnswer(
            token=text,
            cluster=self._cluster,
            publish_interval_s=self._interval_s,
            gpu_type="",
            expires_s=holder.expires_s,
            nonce=credential.nonce,
        )
        return answer, holder

    async def _check(self, credential: AttemptCredential, uid: int) -> None:
        if credential.cluster not in ("", self._cluster):
            raise HttpRefusal(
                403, "not-yours", f"this is the gateway of cluster {self._cluster}, not {credential.cluster}"
            )
        found = await self._run(partial(self._records.attempt_of, credential.job, credential.attempt))
        if found is None:
            raise of_attempt("unknown")
        owner, refusal = found
        if owner != uid:
            raise HttpRefusal(403, "not-yours", f"job {credential.job} is not a job of user {uid}")
        if refusal is not None:
            raise of_attempt(refusal)

    def known(self, text: str) -> Holder | None:
        """Return who holds a token that was seen not long ago."""
        digest, now = hashlib.sha256(text.encode()).digest(), time.monotonic()
        found = self._known.get(digest)
        return found[0] if found is not None and now < min(found[1], found[2]) else None

    async def holder(self, text: str, client: Visitor) -> Holder:
        """Return who holds a token that is not `known`. Raises Refused, StoreError."""
        if _TEXT.fullmatch(text) is None:
            raise token_refused("expected `Authorization: Bearer TOKEN` with a token of this gateway")
        digest, now = hashlib.sha256(text.encode()).digest(), time.monotonic()
        if self._unknown.get(digest, 0.0) > now:
            raise token_refused("the gateway does not know this token (any more)")
        async with self._looked_up.turn(client.name):
            client.checked = True
            found = await self._run(partial(self._records.token_of, digest), self._looking)
            if found is None:
                self._known.pop(digest, None)
                _put(self._unknown, digest, now + 5.0, 10_000)
                raise token_refused("the gateway does not know this token (any more)")
        holder: Holder
        holder, refusal = found
        if refusal is not None:
            self._known.pop(digest, None)
            raise of_attempt(refusal)
        self._remember(digest, holder)
        return holder

    def _remember(self, digest: bytes, holder: Holder) -> None:
        now = time.monotonic()
        lives = float("inf") if holder.expires_s is None else now + holder.expires_s
        _put(self._known, digest, (holder, now + _REMEMBERED_S, lives), _REMEMBERED)

    def forget(self, token: str) -> None:
        """Believe a token no longer: the database has refused its attempt."""
        self._known.pop(hashlib.sha256(token.encode()).digest(), None)

    async def _run(self, call: Callable[[], Any], threads: Executor | None = None) -> Any:
        return await asyncio.get_running_loop().run_in_executor(threads or self._threads, call)


def _put(memory: OrderedDict[bytes, Any], key: bytes, value: Any, most: int) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > most:
        memory.popitem(last=False)


def _credential(payload: bytes) -> AttemptCredential | UserCredential:
    for model in (AttemptCredential, UserCredential) if len(payload) <= _PAYLOAD else ():
        try:
            return model.model_validate_json(payload)
        except ValidationError:
            continue
    raise not_sensible("the credential holds neither an attempt nor a user: see the reference of messages")
