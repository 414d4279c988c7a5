"""Fuzz job directives as a hostile user would write them.

The Lua hook accepts only directives that polluxd's parser then reads to the same values.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polluxd.errors import DirectiveError
from polluxd.slurm.directives import parse_admin_comment
from tests.unit.slurm.lua_hooks import HOOK, LUA, NEEDS_LUA, UNSET, lua

# Reads a script and an option per line, in hexadecimal; answers with the AdminComment, "refused" or "plain".
SERVER = """
slurm = {{ SUCCESS = 0, ERROR = -1, log_user = function(f, ...) string.format(f, ...) end,
  log_info = function(f, ...) end }}
pollux_config = {{ gateway = "https://g", lease_s = 100 }}
dofile("{hook}")
local function text(hexadecimal)
  return (string.gsub(hexadecimal, "..", function(byte) return string.char(tonumber(byte, 16)) end))
end
for line in io.lines() do
  local script, option = string.match(line, "^(%x*) (%x*)$")
  local job = {job}
  job.script = text(script)
  if option ~= "" then
    job.spank_job_env[0] = "_SLURM_SPANK_OPTION_pollux_pollux=" .. text(option)
  end
  local status = slurm_job_submit(job, nil, 1000)
  print(status ~= 0 and "refused" or job.admin_comment or "plain")
  io.flush()
end
"""


class Hook:
    """Run the submission hook in one Lua process that reads a script a line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def submit(self, script: str, option: str = "") -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = f"{script.encode().hex()} {option.encode().hex()}\n"
        self._process.stdin.write(line)
        self._process.stdin.flush()
        return self._process.stdout.readline().rstrip("\n")


@pytest.fixture(scope="module")
def hook() -> Iterator[Hook]:
    assert LUA is not None
    job = UNSET | {"tres_per_node": "gres:gpu:1", "environment": {}, "spank_job_env": {}}
    program = SERVER.format(hook=HOOK, job=lua(job))
    with subprocess.Popen(
        [LUA, "-e", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Hook(process)
        assert process.stdin is not None
        process.stdin.close()


KEYS = ("min-gpus", "max-gpus", "gpu-counts", "adaptive", "preemptible", "prior", "mode", "resize")
NUMBERS = ("1", "2", "8", "65533", "65534", "0", "-1", "007", "1e3", "0x10", "99999999999999999999")
NAMES = ("yes", "no", "any", "powers-of-two", "whole-nodes", "1,2,4", "8,2,2", ",", "", "enforce", "in-place")
VALUES = st.sampled_from((*NUMBERS, *NAMES))
ANYTHING = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40
)  # sbatch refuses a script with NUL
INTERNAL = f"admin_comment=x companion-of=3 attempt=1 move=2 nonce={'a' * 32} submitted=1 pollux:v1 #"
WORDS = st.one_of(
    st.builds("{}={}".format, st.sampled_from(KEYS), VALUES),
    st.builds("{}={}".format, st.sampled_from(KEYS), ANYTHING),
    st.sampled_from(INTERNAL.split()),
    ANYTHING,
)
LINES = st.builds(
    "{}{}".format,
    st.sampled_from(("#POLLUX ", "#POLLUX\t", "#pollux ", "# POLLUX: ", "#SBATCH ", "", "#POLLUX")),
    st.lists(WORDS, max_size=4).map(" ".join),
)
SCRIPTS = st.lists(LINES, max_size=5).map("\n".join)


@NEEDS_LUA
@given(SCRIPTS, st.one_of(st.just(""), st.lists(WORDS, max_size=3).map(" ".join)))
@example("#POLLUX min-gpus=1\n#POLLUX companion-of=1 attempt=0 move=1", "")
@example("#POLLUX min-gpus=1\x0badmin=1", "")
@example("#POLLUX", "yes")
def test_the_parser_reads_everything_that_the_hook_writes(hook: Hook, script: str, option: str) -> None:
    answer = hook.submit(f"#!/bin/bash\n{script}\ntrue\n", option)
    assert answer, "the hook ended: an error in it would stop every submission"
    if answer in ("refused", "plain"):
        return
    assert answer.isascii()
    assert answer.isprintable(), answer
    found = parse_admin_comment(answer)
    assert found is not None, answer
    assert found.submitted is not None
    spec = found.spec
    assert 1 <= spec.min_gpus <= (spec.max_gpus or 65533) <= 65533


COMMENT_KEYS = "cpus-per-gpu mem-per-gpu submitted begin companion-of attempt move nonce"
COMMENT_WORDS = st.one_of(
    st.builds(
        "{}={}".format,
        st.sampled_from((*KEYS, *COMMENT_KEYS.split())),
        st.one_of(VALUES, ANYTHING, st.just("0af" * 11), st.just("0af1" * 8)),
    ),
    ANYTHING,
)


@given(st.lists(COMMENT_WORDS, max_size=8).map(" ".join))
def test_a_comment_is_read_or_refused(words: str) -> None:
    try:
        found = parse_admin_comment(f"pollux:v1 {words}")
    except DirectiveError:
        return
    assert found is not None
    assert found.spec.min_gpus >= 1
    assert found.spec.max_gpus is None or found.spec.max_gpus >= found.spec.min_gpus
