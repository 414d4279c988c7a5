"""The job side of polluxd: `pollux.attach` and `pollux run`.

Importing this package imports neither torch nor scipy: polluxd reads `pollux.goodput` from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pollux.version import __version__

if TYPE_CHECKING:
    from pollux.loop.session import Job, attach

__all__ = ["Job", "__version__", "attach"]


def __getattr__(name: str) -> Any:
    if name in ("Job", "attach"):
        from pollux.loop import session  # noqa: PLC0415 - brings torch in, at first use

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
