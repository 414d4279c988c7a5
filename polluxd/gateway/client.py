"""Ask the gateway as an ordinary user: `polluxctl`."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from pollux.scheduler.gateway import Gateway, GatewayAway, GatewayError, MessageRefused, TokenRefused
from pollux.scheduler.munge import Munge, MungeError
from pollux.slurm_job.access import ADDRESSES, CA
from polluxd.config.settings import GatewaySettings
from polluxd.errors import PolluxError, SlurmGarbled

_ANSWER_S = 65.0
_LARGEST = 256 << 20


class NoGateway(PolluxError):
    """No gateway answers here."""


class UserClient:
    """Asks the first gateway that answers, with a token.

    Args:
        addresses: URLs of gateways.
        ca: file of the certificates that vouch for them; empty: the system's.
    """

    def __init__(self, addresses: Sequence[str], ca: str, munge: Munge) -> None:
        self._gateway = Gateway(addresses, ca)
        self._munge = munge
        self._token = ""

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._gateway.addresses

    def ask(self, path: str, **words: object) -> Any:
        """Return the document of an answer.

        Raises NoGateway, and PolluxError where munge or the gateway refuses.
        """
        question = urlencode({name: json.dumps(value) for name, value in words.items()})
        where = f"{path}?{question}" if question else path
        failed: list[str] = []
        for _ in range(len(self._gateway.addresses) + 1):
            try:
                if not self._token:
                    self._token = self._new_token()
                return self._gateway.ask(
                    "GET", where, token=self._token, answer_s=_ANSWER_S, largest=_LARGEST
                )
            except TokenRefused:
                self._token = ""  # of another gateway before its restart, or ten minutes old
            except GatewayAway as error:
                failed.append(str(error))
            except MessageRefused as error:
                raise PolluxError(re.sub(r"^.*? answers \d+ \S+: ", "", str(error))) from None
            except GatewayError as error:
                raise PolluxError(str(error)) from None
        raise NoGateway(
            f"polluxd's gateway does not answer: {'; '.join(failed) or 'no token is accepted'}. Ask an administrator "
            f"to start polluxd-gateway, or name its address with {ADDRESSES}=https://HOST:PORT"
        )

    def _new_token(self) -> str:
        nonce = secrets.token_hex(16)
        payload = json.dumps({"purpose": "user", "nonce": nonce}).encode()
        try:
            credential = self._munge.encode(payload).decode()
        except MungeError as error:
            raise PolluxError(str(error)) from None
        answer = self._gateway.ask("POST", "/v1/tokens", {"credential": credential})
        if not isinstance(answer, Mapping) or answer.get("nonce") != nonce:
            raise GatewayAway(f"{self._gateway.address}: the token belongs to another question")
        return str(answer["token"])


def munge_socket(slurm_settings: str) -> Path | None:
    """Return the socket that AuthInfo of slurm.conf names in `scontrol show config`; None: munge's own."""
    named = re.search(r"^AuthInfo\s+= .*?socket=([^,\s]+)", slurm_settings, re.MULTILINE)
    return Path(named[1]) if named else None


def user_client(slurm_settings: str, environ: Mapping[str, str] = os.environ) -> UserClient:
    """Return a client of the gateways.

    They are those of POLLUX_GATEWAY, else on slurmctld's machines.

    Args:
        slurm_settings: what `scontrol show config` prints.

    Raises:
        SlurmGarbled: the settings name no controller.
    """
    munge = Munge(munge_socket(slurm_settings))
    named = [each.strip() for each in environ.get(ADDRESSES, "").split(",") if each.strip()]
    if named:
        return UserClient(named, environ.get(CA, ""), munge)
    port = GatewaySettings().listen.rpartition(":")[2]
    hosts = re.findall(r"^SlurmctldHost\[\d+\]\s+= (\S+?)(?:\((\S+)\))?\s*$", slurm_settings, re.MULTILINE)
    if not hosts:
        raise SlurmGarbled(f"expected SlurmctldHost from `scontrol show config`, got {slurm_settings[:80]!r}")
    # On slurmctld's own machine the gateway may listen at the loopback address, without TLS.
    local = [f"http://127.0.0.1:{port}"]
    return UserClient([f"https://{address or host}:{port}" for host, address in hosts] + local, "", munge)
