"""The modes of the agent: observe, advise, enforce."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum

from pollux.errors import PolluxAgentError


class Mode(StrEnum):
    """What the agent changes of a training."""

    OBSERVE = "observe"
    """Measures and reports; changes neither batch size nor learning rate."""
    ADVISE = "advise"
    """As `observe`, and logs the batch size that it would choose."""
    ENFORCE = "enforce"
    """Chooses the batch size and scales the learning rate."""


def mode_for(
    adaptive: bool | None, default: bool, environ: Mapping[str, str] = os.environ
) -> tuple[Mode, bool]:
    """Return the mode, and whether the batch size may change.

    POLLUX_MODE is the mode, which the submission hook sets from `#POLLUX mode=`; without it the mode is enforce.
    `adaptive` is the script's argument; without it, `default` counts. Raises PolluxAgentError for an unknown mode.
    """
    text = environ.get("POLLUX_MODE", "").strip().lower()
    try:
        mode = Mode(text or Mode.ENFORCE)
    except ValueError:
        known = ", ".join(Mode)
        raise PolluxAgentError(f"expected POLLUX_MODE to be one of {known}, got {text!r}") from None
    return mode, (default if adaptive is None else adaptive) and mode is Mode.ENFORCE
