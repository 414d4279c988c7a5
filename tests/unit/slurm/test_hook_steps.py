"""The submission hook under slurmctld's lock: how many steps it takes, whatever a script holds."""

from __future__ import annotations

import subprocess

import pytest

from tests.unit.slurm.lua_hooks import LUA, NEEDS_LUA
from tests.unit.slurm.worst_scripts import PRELUDE, WORST, Pieces

pytestmark = NEEDS_LUA

MOST_STEPS = 1_000_000
"""Instructions of Lua's machine, and bytes that its functions on strings pass. Some 10 ns each."""

COUNT = """
local steps = 0
local function counted(name, bytes)
  local original = string[name]
  string[name] = function(text, ...)
    local results = { original(text, ...) }
    steps = steps + bytes(text, results, ...)
    return (table.unpack or unpack)(results)
  end
end
local function all(text) return #text end
for _, name in ipairs({ "match", "gmatch", "gsub", "upper", "lower" }) do counted(name, all) end
counted("sub", function(text, results) return #results[1] end)
counted("find", function(text, results, pattern, init) return (results[2] or #text) - (init or 1) + 1 end)
local script = text()
debug.sethook(function() steps = steps + 100 end, "", 100)
slurm_job_submit(job_of(script), nil, 1000)
debug.sethook()
print(steps)
"""


def steps(pieces: Pieces) -> int:
    text = " .. ".join(f'string.rep("{unit.encode("unicode_escape").decode()}", {n})' for unit, n in pieces)
    program = f"{PRELUDE}\nlocal function text() return {text} end\n{COUNT}"
    done = subprocess.run([LUA, "-"], input=program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("name", WORST)
def test_no_script_costs_more_steps_than_others(name: str) -> None:
    assert steps(WORST[name]) <= MOST_STEPS


def test_a_script_without_a_directive_costs_what_a_plain_one_costs() -> None:
    plain = steps([("#!/bin/sh\n", 1), ("#SBATCH --gres=gpu:1\n", 20), ("srun hostname\n", 4000)])
    near = steps([("#!/bin/sh\n", 1), ("#POLLUZ aaaaaaaaaaaaaaaaaaaaaaaa=\n", 20), ("srun hostname\n", 4000)])
    assert near <= plain + 150_000, "guesses have a bound of their own"


@pytest.mark.parametrize(
    ("head", "option", "most"),
    [
        ("", "", 2),
        ("#POLLUX min-gpus=2", "time_min", 2),
        ("#POLLUX min-gpus=2", "", 12),
        ("#POLLUX min-gpus=2 search=lr", "", 13),
    ],
)
def test_variables_are_looked_at_a_few_times(head: str, option: str, most: int) -> None:
    """Slurm passes all variables of a job, which may be a million, for each that is read or written."""
    program = f"""{PRELUDE}
local job = job_of("#!/bin/sh\\n{head}\\npollux run train.py")
local touched, inside = 0, {{}}
job.environment = setmetatable({{}}, {{
  __index = function(_, name) touched = touched + 1; return inside[name] end,
  __newindex = function(_, name, value) touched = touched + 1; inside[name] = value end }})
if "{option}" ~= "" then job["{option}"] = 1 end
slurm_job_submit(job, nil, 1000)
print(touched)"""
    done = subprocess.run([LUA, "-"], input=program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) <= most
