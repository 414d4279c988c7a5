"""Log lines as text and JSON, and the ids in them."""

from __future__ import annotations

import json
import logging

import pytest

from polluxd.logs import JsonFormatter, TextFormatter, about

HOSTILE = 'train", "level": "error\n2026-01-01 ERROR forged \x1b[2J\u202e\ud800'


def record(message: str = "job %s", *args: object) -> logging.LogRecord:
    return logging.LogRecord("polluxd.cycle.controller", logging.INFO, "f", 1, message, args, None)


def test_a_line_of_json_has_the_ids_and_nothing_of_a_users_ends_it() -> None:
    with about(cycle=3), about(job=7, move=12):
        line = JsonFormatter().format(record("job %s", HOSTILE))
    assert "\n" not in line
    assert line.isascii()
    assert line.isprintable()
    read = json.loads(line)
    assert read.keys() == {"time", "level", "logger", "message", "cycle", "job", "move"}
    assert (read["level"], read["job"], read["move"], read["cycle"]) == ("info", 7, 12, 3)
    assert read["message"].startswith('job train", "level": "error\\n2026')


def test_a_fault_is_one_line_of_json_and_in_text_a_line_with_its_traceback_below() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        made = record("job %s", HOSTILE)
        made.exc_info = (type(error), error, error.__traceback__)
    line = JsonFormatter().format(made)
    assert "\n" not in line
    assert "Traceback" in json.loads(line)["exception"]
    first, *others = TextFormatter().format(made).split("\n")
    assert first.endswith("error\\n2026-01-01 ERROR forged \\x1b[2J\\u202e\\ud800")
    assert others[-1] == "    2026-01-01 ERROR forged \\x1b[2J\\u202e\\ud800"
    assert all(line.startswith("    ") for line in others), "a traceback, indented"


@pytest.mark.parametrize(("ids", "end"), [({}, "job 7"), ({"job": 7, "move": 12}, "job 7 [job=7 move=12]")])
def test_a_line_of_text_ends_with_its_ids(ids: dict[str, int], end: str) -> None:
    with about(**ids):
        assert TextFormatter().format(record("job %s", 7)).endswith(f"INFO polluxd.cycle.controller: {end}")


def test_ids_end_with_what_they_are_about() -> None:
    with about(job=7):
        pass
    assert "job" not in json.loads(JsonFormatter().format(record("nothing")))
