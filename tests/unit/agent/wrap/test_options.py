"""Options of `pollux wrap`."""

from __future__ import annotations

import pytest

from pollux.wrap.__main__ import parser
from pollux.wrap.sizes import UNKNOWN_BATCH


def batches(*words):
    return parser().parse_args(["--checkpoints", "out/*", *words, "--", "train"]).batches


def test_a_batch_size_is_a_number_or_a_schedule_by_step():
    assert batches() == ((0.0, UNKNOWN_BATCH),)
    assert batches("--batch", "48") == ((0.0, 48),)
    assert batches("--batch", "0:768 250000:1536") == ((0.0, 768), (250000.0, 1536))
    assert batches("--batch", "0s:768 192000000s:1536") == ((0.0, 768), (250000.0, 1536))
    # 100 steps of 8, then 50 of 16, each up to the samples that it names; the last step may pass them.
    assert batches("--batch", "0:8 100:16 1590s:32") == ((0.0, 8), (100.0, 16), (150.0, 32))


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "0", "-1", "x", "4.5", "1e3", "5:48", "0:768 0:1536", "0:768 9:8 5:4", "0:768,5:8", "0:0"),
        *("0:-4", "0:8 100:16 500s:32", "0:8 s:16"),
        *("768 1536", "0:768 :1536", "0:9999999999", " ".join(f"{n}:8" for n in range(33)), "\u0661"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        batches("--batch", text)
    assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["KILL", "SIGSTOP", "none"])
def test_a_signal_that_no_trainer_can_catch_is_refused(name, capsys):
    with pytest.raises(SystemExit):
        batches("--signal", name)
    assert "a signal that a trainer can catch, such as TERM" in capsys.readouterr().err
