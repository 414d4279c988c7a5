"""Log lines about a move name its job and the cycle that decided on it."""

from __future__ import annotations

import json
import logging

from polluxd.apply.move_ids import MoveIds
from polluxd.logs import JsonFormatter
from polluxd.model import Move, Placement, Step

MOVE = Move(7, 41, 0, "start", Placement(), Placement(("n1",), 2), "", Step.PLANNED, {})


def said(ids: MoveIds) -> dict[str, object]:
    record = logging.LogRecord("polluxd", logging.INFO, __file__, 1, "begins", (), None)
    with ids.about(MOVE):
        line = json.loads(JsonFormatter().format(record))
    return {name: line[name] for name in ("cycle", "job", "move") if name in line}


def test_a_line_names_the_deciding_cycle_while_the_move_is_open() -> None:
    ids = MoveIds()
    ids.decided(3, [MOVE])
    ids.keep([MOVE])
    assert said(ids) == {"cycle": 3, "job": 41, "move": 7}
    ids.keep([])
    assert said(ids) == {"job": 41, "move": 7}
