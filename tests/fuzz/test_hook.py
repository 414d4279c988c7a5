"""Fuzz the submission hook's cost: slurmctld waits for it, whoever submits whatever.

The hook of a real Lua measures its own CPU time on each script. `make fuzz` writes the largest into
tests/benchmarks/fuzz.md. What may not grow, the steps, tests/unit/slurm/test_hook_steps.py counts.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.page import with_note
from tests.unit.slurm.lua_hooks import LUA, NEEDS_LUA
from tests.unit.slurm.worst_scripts import PRELUDE, WORST, Pieces

MOST_MS = 20
PAGE = Path(__file__).parents[1] / "benchmarks" / "fuzz.md"

# Reads the number of pieces, then of each its bytes and times, and the bytes; answers with milliseconds of CPU. The
# least of up to three runs counts, because other processes of the machine take a share of its caches.
SERVER = (
    PRELUDE
    + """
local function cost(script)
  collectgarbage()
  local began = os.clock()
  slurm_job_submit(job_of(script), nil, 1000)
  return (os.clock() - began) * 1000
end
while true do
  local count = io.read("*n")
  if not count then break end
  local pieces = {}
  for i = 1, count do
    local bytes, times = io.read("*n", "*n")
    io.read(1)
    pieces[i] = string.rep(bytes > 0 and io.read(bytes) or "", times)
  end
  local script = table.concat(pieces)
  local least = cost(script)
  for _ = 2, 3 do least = least > 5 and math.min(least, cost(script)) or least end
  print(string.format("%.3f", least))
  io.flush()
end
"""
)


class Hook:
    """Run the submission hook in one Lua process, and keep the largest cost."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.scripts = 0
        self.most_ms, self.most_of = 0.0, ""

    def cost_ms(self, pieces: Pieces) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        texts = [(unit.encode(), times) for unit, times in pieces]
        message = b"".join(b"%d %d\n%s" % (len(text), times, text) for text, times in texts)
        self._process.stdin.write(b"%d\n%s\n" % (len(texts), message))
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the hook ended: an error in it would stop every submission: {pieces!r}"
        if float(answer) > self.most_ms:
            self.most_ms, self.most_of = float(answer), repr(pieces)
        self.scripts += 1
        return float(answer)


@pytest.fixture(scope="module")
def hook() -> Iterator[Hook]:
    assert LUA is not None
    with subprocess.Popen([LUA, "-e", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        made = Hook(process)
        yield made
        assert process.stdin is not None
        process.stdin.close()
    words = (
        f"at most {made.most_ms:.1f} ms of CPU a script under slurmctld's lock, with `{made.most_of[:90]}`"
    )
    PAGE.write_text(with_note(PAGE.read_text(), made.scripts, "hook", words))


WORDS = st.sampled_from(
    (
        "#POLLUX",
        "#POLLUZ",
        "#pollux",
        "# POLLUX",
        "#SBATCH",
        "#AAAAAAAA",
        "companion-of=",
        "min-gpus",
        "gpu-types=",
        "a=",
    )
)
LETTERS = st.sampled_from(
    (" ", "\t", "\r", "\n", "#", "=", ",", "a", "A", "X", "_", "-", "%", "(", "[", "é", "\x01")
)
UNITS = st.lists(st.one_of(WORDS, LETTERS, LETTERS), min_size=1, max_size=12).map("".join)
TIMES = st.one_of(st.integers(1, 40), st.integers(1, 2000), st.sampled_from((9000, 70_000, 400_000)))
RANDOM = st.lists(st.tuples(UNITS, TIMES), min_size=1, max_size=5)


@st.composite
def mutated(draw: st.DrawFn) -> Pieces:
    """A script that is bad for some reader, with letters and pieces changed."""
    pieces = list(draw(st.sampled_from(list(WORST.values()))))
    place = draw(st.integers(0, len(pieces) - 1))
    unit, times = pieces[place]
    at = draw(st.integers(0, len(unit)))
    pieces[place] = (unit[:at] + draw(UNITS) + unit[at + draw(st.integers(0, 3)) :], times)
    if draw(st.booleans()):
        pieces.insert(draw(st.integers(0, len(pieces))), (draw(UNITS), draw(TIMES)))
    return pieces


@NEEDS_LUA
@given(st.one_of(RANDOM, mutated()))
def test_a_script_of_any_content_holds_slurmctld_for_a_moment_only(hook: Hook, pieces: Pieces) -> None:
    bounded = [(unit, min(times, 400_000 // len(unit.encode()))) for unit, times in pieces if unit]
    cost = hook.cost_ms(bounded)
    # On a machine that measures: a slow one may take longer.
    assert cost <= MOST_MS or not os.environ.get("POLLUX_FUZZ_INPUTS")
