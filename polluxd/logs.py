"""Log lines as text or JSON, with the ids that they are about.

with about(job=7, move=12):
    log.info("...")         # ... [job=7 move=12]
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

from polluxd.printable import printable

_about: ContextVar[Mapping[str, int]] = ContextVar("about", default={})  # noqa: B039 - nobody changes it


@contextmanager
def about(**ids: int) -> Iterator[None]:
    """Add ids (`job`, `move`, `cycle`) to every line that the body logs."""
    token = _about.set({**_about.get(), **ids})
    try:
        yield
    finally:
        _about.reset(token)


class TextFormatter(logging.Formatter):
    """One printable line per record, for people, with the ids at its end; a traceback's lines are indented below."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        # Indented, since the exception's own message may hold a line that looks like a record.
        first, *others = super().format(record).splitlines()
        return "\n".join([first, *(f"    {printable(line)}" for line in others)])

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name that logging calls
        ids = " ".join(f"{name}={number}" for name, number in _about.get().items())
        return printable(super().formatMessage(record)) + (f" [{ids}]" if ids else "")


class JsonFormatter(logging.Formatter):
    """One JSON object per line, in ASCII: no text of a user's can end a line or a field."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable(record.getMessage()),
            **_about.get(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


_handler = logging.StreamHandler()


def begin(level: int) -> None:
    """Log to standard error, as text until `use` says otherwise."""
    use("text")
    logging.basicConfig(level=level, handlers=[_handler])


def use(form: str) -> None:
    """Write lines in the form of `log.format` from now on."""
    _handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
