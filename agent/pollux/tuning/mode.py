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
    given: str | None, adaptive: bool | None, default: bool, environ: Mapping[str, str] = os.environ
) -> tuple[Mode, bool]:
    """Return the mode, and whether the batch size may change.

    `given` is the script's argument; without it POLLUX_MODE counts, which the submission hook sets from `#POLLUX
    mode=`; else the mode is enforce. `adaptive` is the script's argument, too; without it, a given mode means yes, else
    `default` counts. Raises PolluxAgentError for an unknown mode.
    """
    text = (given if given is not None else environ.get("POLLUX_MODE", "")).strip().lower()
    try:
        mode = Mode(text or Mode.ENFORCE)
    except ValueError:
        known, where = ", ".join(Mode), "mode" if given is not None else "POLLUX_MODE"
        raise PolluxAgentError(f"expected {where} to be one of {known}, got {text!r}") from None
    if adaptive is None:
        adaptive = default or given is not None
    return mode, adaptive and mode is Mode.ENFORCE
