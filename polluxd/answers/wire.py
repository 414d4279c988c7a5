"""What goes over the wire: one request line, and the lines of an answer."""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from polluxd.errors import PolluxError

from .munge import Munge

LONGEST_REQUEST = 4096
"""Bytes of a request's line; a credential around the longest request has fewer than 1,000."""
LONGEST_ANSWER = 64 << 20
"""Bytes of an answer, compressed and in credentials."""
_CREDENTIAL = 256 << 10
"""Payload of one credential of an answer; munged accepts up to 1 MiB."""
REFUSED = b"!"
"""Begins a line that says, without a credential, why there is no answer."""


class AnswerError(PolluxError):
    """The answer cannot be understood."""


class _Question(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    nonce: Annotated[str, Field(min_length=16, max_length=64)] = Field(
        default_factory=lambda: secrets.token_hex(16)
    )
    """Comes back with the answer: an old answer is none."""


JobId = Annotated[int, Field(ge=1, lt=1 << 32)]


class Jobs(_Question):
    ask: Literal["jobs"] = "jobs"
    ended: bool = False


class Top(_Question):
    ask: Literal["top"] = "top"


class Explain(_Question):
    ask: Literal["explain"] = "explain"
    job: JobId


class History(_Question):
    ask: Literal["history"] = "history"
    job: JobId
    since: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


Question = Jobs | Top | Explain | History
_QUESTION: TypeAdapter[Question] = TypeAdapter(Annotated[Question, Field(discriminator="ask")])


def request_line(munge: Munge, question: Question) -> bytes:
    return munge.encode(question.model_dump_json().encode()) + b"\n"


def read_request(munge: Munge, line: bytes) -> tuple[Question, int]:
    """Return the question and the uid that asks.

    Raises MungeError, AnswerError.
    """
    payload, uid = munge.decode(line.strip())
    try:
        return _QUESTION.validate_json(payload), uid
    except (ValidationError, RecursionError):
        raise AnswerError(
            "polluxd does not know this question: polluxctl here is of another version, or it is no polluxctl"
        ) from None


def answer_lines(munge: Munge, nonce: str, uid: int, document: Any) -> list[bytes]:
    """Return the lines of an answer that only `uid` can read."""
    packed = zlib.compress(json.dumps({"nonce": nonce, "answer": document}, allow_nan=False).encode())
    parts = [packed[at : at + _CREDENTIAL] for at in range(0, len(packed), _CREDENTIAL)]
    return [munge.encode(part, for_uid=uid) + b"\n" for part in parts] + [b"\n"]


def read_answer(munge: Munge, nonce: str, lines: Sequence[bytes], trusted: frozenset[int]) -> Any:
    """Return the document of an answer.

    Raises MungeError, and AnswerError where the maker is not trusted or the answer belongs to another question.
    """
    packed = b""
    for line in lines:
        part, uid = munge.decode(line.strip())
        if uid >= 1000 and uid not in trusted:
            raise AnswerError(
                f"the answer comes from uid {uid}, which is neither a system account nor SlurmUser"
            )
        packed += part
    try:
        document = json.loads(zlib.decompress(packed))
        if document["nonce"] == nonce:
            return document["answer"]
    except (zlib.error, ValueError, KeyError, TypeError):
        pass
    raise AnswerError("the answer belongs to no question of this polluxctl")
