"""Run the Slurm hooks under a real Lua 5.1, with `slurm` stubbed.

Slurm's plugin embeds Lua 5.1.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

HOOK = Path(__file__).resolve().parents[3] / "slurm_hooks" / "job_submit.lua"
LUA = next((found for name in ("lua5.1", "lua5.3", "lua5.4", "lua") if (found := shutil.which(name))), None)

NEEDS_LUA = pytest.mark.skipif(LUA is None, reason="needs a Lua interpreter (Debian: lua5.1)")

DRIVER = """
local said = {{}}
slurm = {{ SUCCESS = 0, ERROR = -1, EXPEDITED_REQUEUE = 2 ^ 35,
  log_user = function(f, ...) said[#said + 1] = string.format(f, ...) end,
  log_info = function(f, ...) end, log_error = function(f, ...) end }}
pollux_config = {config}
dofile("{hook}")
local job = setmetatable({job}, {{ __newindex = function(job, key, value)
  if key == "gres" then key, value = "tres_per_node", "gres:" .. value end  -- As job_submit/lua of 22.05 does.
  rawset(job, key, value)
end }})
local rc = {call}
print(rc)
print(#said)
for _, text in ipairs(said) do print((string.gsub(text, "\\n", " "))) end
for _, key in ipairs({{"admin_comment", "begin_time", "requeue", "tres_per_job"}}) do
  print(tostring(job[key]))
end
for _, key in ipairs({{"GATEWAY", "GATEWAY_CA", "TOKEN", "ADAPTIVE", "PRIOR", "MODE", "RESIZE", "CONTINUE",
  "SEARCH"}}) do
  print(tostring(job.environment and job.environment["POLLUX_" .. key]))
end
print((string.gsub(tostring(job.comment), "\\n", " ")))
"""

# What sbatch leaves unset, as 22.05.8 shows it to the hook.
UNSET = {
    "begin_time": 0,
    "cpus_per_task": 65534,
    "het_job_offset": 4294967294,
    "max_nodes": 4294967294,
    "min_nodes": 4294967294,
    "ntasks_per_node": 65534,
    "ntasks_per_tres": 65534,
    "num_tasks": 4294967294,
    "priority": 4294967294,
    "requeue": 65534,
    "shared": 65534,
    "time_min": 4294967294,
}


@dataclass
class Outcome:
    accepted: bool
    said: list[str]
    admin_comment: str | None
    begin_time: float
    requeue: str
    tres_per_job: str | None
    gateway: str | None
    gateway_ca: str | None = None
    token: str | None = None
    adaptive: str | None = None
    prior: str | None = None
    mode: str | None = None
    resize: str | None = None
    continues: str | None = None
    search: str | None = None
    comment: str | None = None


def lua(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"[{lua(k)}] = {lua(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list):
        return "{" + ", ".join(lua(v) for v in value) + "}"
    if isinstance(value, str):
        return (
            '"'
            + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
            + '"'
        )
    return str(value)


def run(call: str, job: dict[str, object], config: dict[str, object]) -> Outcome:
    driver = DRIVER.format(config=lua(config), hook=HOOK, job=lua(job), call=call)
    done = subprocess.run([LUA, "-"], input=driver, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    said = lines[2 : 2 + int(lines[1])]
    rest = [None if text == "nil" else text for text in lines[2 + int(lines[1]) :]]
    return Outcome(lines[0] == "0", said, rest[0], float(rest[1] or 0), rest[2] or "", *rest[3:])


def submit(
    head: str, config: dict[str, object] | None = None, *, trains: str = "pollux run train.py", **job: object
) -> Outcome:
    script = f"#!/bin/bash\n#SBATCH --gres=gpu:2\n{head}\n{trains}\n"
    fields = (
        UNSET
        | {"tres_per_node": "gres:gpu:2", "script": script, "environment": {"SLURM_OPEN_MODE": "a"}}
        | job
    )
    return run(
        "slurm_job_submit(job, nil, 1000)",
        fields,
        {"gateway": "https://g:1", "lease_s": 100} | (config or {}),
    )


def refused(outcome: Outcome) -> str:
    assert not outcome.accepted
    assert outcome.admin_comment is None
    assert len(outcome.said) == 1
    return outcome.said[0]


def comment(outcome: Outcome) -> str:
    """The AdminComment without the time of submission and the size that was asked for."""
    assert outcome.accepted, outcome.said
    words = outcome.admin_comment.split()
    assert abs(int(next(w for w in words if w.startswith("submitted="))[10:]) - time.time()) < 60
    return " ".join(w for w in words if not w.startswith(("submitted=", "asked=")))


def modify(
    update: dict[str, object],
    *,
    uid: int = 1000,
    comment: str | None = "pollux:v1 min-gpus=1",
    trusted: int = 990,
) -> Outcome:
    record = {"job_id": 7, "admin_comment": comment}
    fields = UNSET | {"min_nodes": 4294967294} | update
    return run(f"slurm_job_modify(job, {lua(record)}, nil, {uid})", fields, {"trusted_uids": [trusted]})
