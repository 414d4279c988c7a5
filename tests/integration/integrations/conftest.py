"""Real ranks, forked as in the unit tests of the agent.

The ranks are forked, so that a library is imported once for all of them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_SOURCE = Path(__file__).parents[2] / "unit" / "agent" / "conftest.py"
_spec = importlib.util.spec_from_file_location("pollux_test_ranks", _SOURCE)
assert _spec is not None
assert _spec.loader is not None
_ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_ranks)


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    return _ranks.run_ranks  # type: ignore[no-any-return]
