"""Answers of the gateway and results of Postgres, from the hands."""

from __future__ import annotations

import json
from collections.abc import Sequence
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


def answers(lines: Sequence[str]) -> list[Answer]:
    """Read what the hand that asks the gateway has printed."""
    return [Answer(**json.loads(line)) for line in lines]
