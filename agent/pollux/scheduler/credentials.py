"""The token of an attempt, inherited from the launcher or asked for, and what a job sends with it.

A munge credential proves to the gateway who asks. `pollux run` in the batch script asks once, and its ranks inherit the
token: they may run in a container without munge.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from pollux.scheduler.gateway import (
    ANSWER_S,
    AttemptOver,
    Gateway,
    GatewayAway,
    GatewayError,
    MessageRefused,
    TokenRefused,
    TooOften,
)
from pollux.scheduler.munge import Munge, MungeError, MungeMissing
from pollux.slurm_job.access import GatewayAccess, Grant, read_access
from pollux.slurm_job.allocation import gpu_type_of, munge_socket

CONTAINER_PATIENCE_S = 60.0
"""How long the launcher of ranks in a container asks: nobody inside can ask later."""

POLL_S = 65.0
"""Longest wait for orders: the gateway answers after at most 50 s."""


class AccessOver(GatewayError):
    """This process has no token of its attempt, and gets none."""


def ask_for_grant(access: GatewayAccess, gateway: Gateway, socket: Path | None) -> Grant:
    """Ask the gateway for a token of this attempt. `socket`: munged's; None: munge's own.

    Raises GatewayAway: ask again later; AccessOver: this process will get no token.
    """
    nonce = secrets.token_hex(16)
    payload = {
        "purpose": "attempt",
        "cluster": "",
        "job": access.job_id,
        "attempt": access.attempt,
        "nonce": nonce,
    }
    try:
        credential = Munge(socket).encode(json.dumps(payload).encode())
    except MungeMissing as error:
        raise AccessOver(str(error)) from None
    except MungeError as error:
        raise GatewayAway(str(error)) from None
    try:
        answer = gateway.ask("POST", "/v1/tokens", {"credential": credential.decode("ascii", "replace")})
        if not isinstance(answer, dict) or answer.get("nonce") != nonce:
            raise GatewayAway(f"{gateway.address} answers another request")
        return Grant.from_document(answer, access.job_id, access.attempt)
    except TooOften as error:
        raise GatewayAway(str(error)) from None
    except (TokenRefused, AttemptOver, MessageRefused) as error:
        raise AccessOver(str(error)) from None
    except ValueError as error:
        raise GatewayAway(f"{gateway.address} gives no token: {error}") from None


class Credentials:
    """The token of this process; several threads may use it."""

    def __init__(self, access: GatewayAccess) -> None:
        self._access = access
        self._grant = access.grant
        self._refused = False
        """The newest token takes a refused one's place, and has not been accepted yet."""
        self._socket: Path | None = None
        self._asked_slurm = False
        self._lock = threading.Lock()

    def grant(self, gateway: Gateway) -> Grant:
        """Return the grant; ask for it where there is none. Raises GatewayAway, AccessOver."""
        with self._lock:
            if self._grant is None:
                if not self._asked_slurm:
                    self._socket, self._asked_slurm = munge_socket(), True
                self._grant = ask_for_grant(self._access, gateway, self._socket)
            return self._grant

    def accepted(self) -> None:
        """Note that the gateway has accepted the token."""
        self._refused = False

    def replace(self, grant: Grant, error: GatewayError) -> None:
        """Forget a grant that the gateway refuses. Raises AccessOver at the second refusal in a row."""
        with self._lock:
            if self._grant is not grant:
                return  # another thread has replaced it
            if self._refused:
                raise AccessOver(str(error))
            self._grant, self._refused = None, True


class JobGateway:
    """The messages of one attempt, over one connection.

    Only one thread at a time may use it, `interrupt` aside. Every method raises GatewayAway, AccessOver (no further
    message will be accepted) or MessageRefused.
    """

    def __init__(self, gateway: Gateway, credentials: Credentials) -> None:
        self._gateway, self._credentials = gateway, credentials

    @property
    def publish_interval_s(self) -> float:
        """How often the scheduler wants a report [s]."""
        return self._credentials.grant(self._gateway).publish_interval_s

    def publish(self, report: Mapping[str, Any]) -> None:
        """Store a report."""
        self._ask("POST", "/v1/report", report)

    def orders(self, seen: str) -> Mapping[str, Any]:
        """Wait until the orders differ from those with the digest `seen`.

        The wait ends after POLL_S at the latest. Returns {"seen": digest, "drain": move or None, "resize": order or
        None}.
        """
        answer = self._ask("GET", "/v1/orders?" + urlencode({"seen": seen}), answer_s=POLL_S)
        if not isinstance(answer, dict) or not isinstance(answer.get("seen"), str):
            raise GatewayAway(f"{self._gateway.address} gives no orders")
        return answer

    def acknowledge(self, move_id: int, stamps: Mapping[str, Any]) -> bool:
        """Report that a move's checkpoint is durable. Return True if the move counts on the checkpoint."""
        answer = self._ask("POST", "/v1/acknowledgements", {"move": move_id, **stamps})
        return isinstance(answer, dict) and bool(answer.get("accepted"))

    def prior(self, fingerprint: str, gpu_type: str) -> Any:
        """Return what earlier runs of this training measured, or None.

        The runs are the same user's. Later runs receive what this attempt measures. `fingerprint`: 16 to 64 hexadecimal
        digits.
        """
        answer = self._ask("POST", "/v1/training", {"fingerprint": fingerprint, "gpu_type": gpu_type})
        return answer.get("prior") if isinstance(answer, dict) else None

    def interrupt(self) -> None:
        """End a request that another thread waits for."""
        self._gateway.interrupt()

    def close(self) -> None:
        self._gateway.close()

    def _ask(self, method: str, path: str, message: object = None, *, answer_s: float = ANSWER_S) -> Any:
        while True:
            grant = self._credentials.grant(self._gateway)
            try:
                answer = self._gateway.ask(method, path, message, token=grant.token, answer_s=answer_s)
            except TokenRefused as error:
                self._credentials.replace(grant, error)
            except AttemptOver as error:
                raise AccessOver(str(error)) from None
            else:
                self._credentials.accepted()
                return answer


def environment_of_ranks(environ: Mapping[str, str], *, patience_s: float) -> tuple[dict[str, str], str]:
    """Return the variables by which ranks inherit a token of this job.

    The second value says why there are none. Asks each gateway at least once, and for `patience_s` seconds. Outside a
    Pollux job both values are empty.
    """
    access = read_access(environ)
    if access is None:
        return {}, ""
    if access.grant is not None:
        return access.grant.to_environment(), ""
    gateway, socket = Gateway(access.addresses, access.ca), munge_socket()
    deadline, tries = time.monotonic() + patience_s, 0
    try:
        while True:
            tries += 1
            try:
                grant = ask_for_grant(access, gateway, socket)
                node = environ.get("SLURMD_NODENAME", "")
                kind = grant.gpu_type or (gpu_type_of(node) if node else "")
                return replace(grant, gpu_type=kind).to_environment(), ""
            except GatewayAway as error:
                if tries >= len(access.addresses) and time.monotonic() >= deadline:
                    return {}, str(error)
                time.sleep(0.5)
            except AccessOver as error:
                return {}, str(error)
    finally:
        gateway.close()
