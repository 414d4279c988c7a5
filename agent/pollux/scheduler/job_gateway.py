"""What a job tells the gateway and asks it, with the token of its attempt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from pollux.scheduler.credentials import AccessOver, Credentials
from pollux.scheduler.gateway import ANSWER_S, AttemptOver, Gateway, GatewayAway, TokenRefused

POLL_S = 65.0
"""Longest wait for orders: the gateway answers after at most 50 s."""


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
