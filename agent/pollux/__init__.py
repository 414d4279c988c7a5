"""The job side of polluxd: `pollux.attach`, `pollux.trial` and `pollux run`.

Importing this package does not import torch: polluxd reads `pollux.goodput` from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pollux.slurm_job import forked as _forked  # noqa: F401 - notes forks from now on
from pollux.version import __version__

if TYPE_CHECKING:
    from pollux.integrations.trial import trial
    from pollux.loop.session import Job, attach

__all__ = ["Job", "__version__", "attach", "trial"]


def __getattr__(name: str) -> Any:
    if name in ("Job", "attach"):
        from pollux.loop import session  # noqa: PLC0415 - brings torch in, at first use

        return getattr(session, name)
    if name == "trial":
        from pollux.integrations.trial import trial  # noqa: PLC0415

        return trial
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
