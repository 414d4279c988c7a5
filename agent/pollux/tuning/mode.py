"""What the agent may change of a training: nothing, nothing yet, or batch size and learning rate."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum

from pollux.errors import PolluxAgentError


class Mode(StrEnum):
    """How far the agent goes."""

    OBSERVE = "observe"
    """Measures and reports; batch size and learning rate stay the user's."""
    ADVISE = "advise"
    """As observe, and says which batch size it would choose."""
    ENFORCE = "enforce"
    """Chooses the batch size, and scales the learning rate along."""


def mode_for(
    given: str | None, adaptive: bool | None, default: bool, environ: Mapping[str, str] = os.environ
) -> tuple[Mode, bool]:
    """The mode, and whether the batch size may change.

    `given` is the user's word in the script; without it POLLUX_MODE's counts, which the submission hook sets from
    `#POLLUX mode=`, else enforce. `adaptive` is the user's word too; without it a mode given means yes, else `default`.
    Raises PolluxAgentError for a mode that is none.
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
