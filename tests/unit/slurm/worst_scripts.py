"""Scripts that make a reader of scripts work the most: for the hook's count of steps, and for fuzzing its CPU time."""

from __future__ import annotations

from tests.unit.slurm.lua_hooks import HOOK, UNSET, lua

Pieces = list[tuple[str, int]]
"""A script: texts, and how often each of them comes in a row."""

_MANY = 70_000
_KEY = "a" * 24

WORST: dict[str, Pieces] = {
    "words of the agent": [("#POLLUX\n", 1), ("pollux  wra ", 6000)],
    "lines with words of the agent": [("#POLLUX\n", 1), ("x pollux #\n", 6000)],
    "comments": [("# nothing to see here, an ordinary comment\n", _MANY // 43)],
    "near misses of the word and of the key": [(f"#POLLUZ {_KEY}=\n", 2000)],
    "near misses of the key": [(f"#pollux {_KEY}=\n", 2000)],
    "near misses of the word": [("#POLLUZ\n", 9000)],
    "no near misses": [("#AAAAAAAA\n", 7000)],
    "words that are no words": [("#AAAAAAAA" * 8 + "\n", 1000)],
    "directives without a word": [("#POLLUX\n", 9000)],
    "directives of blanks": [("#POLLUX" + " " * 56 + "\n", 1000)],
    "directives of comments": [("#POLLUX #" + "=" * 54 + "\n", 1000)],
    "a directive of comments": [("#POLLUX", 1), ("  #", 300)],
    "a long directive": [("#POLLUX ", 1), ("a=", _MANY)],
    "a wrong key": [("#POLLUX ", 1), ("a" * 1000 + "=1", 1)],
    "a companion of nobody": [("#POLLUX ", 1), ("companion-of", 6000)],
    "companions": [("#POLLUX companion-of=\n", 3000)],
    "line breaks": [("\n", _MANY)],
    "line breaks of DOS": [("\r\n", _MANY)],
    "line breaks before a directive": [("\n", 65_500), ("#POLLUX\n", 1)],
    "nearly strays": [("true\n", 1), ("#POLLUXX\n", 9000)],
    "strays": [("true\n", 1), ("#POLLUX\n", 9000)],
    "hashes": [("#", 4_000_000)],
    "blanks": [(" ", 4_000_000)],
    "blanks before a hash": [((" " * 90 + "#\n"), 1000)],
    "carriage returns": [("\r", _MANY)],
    "one long line": [("#", 1), ("x", 4_000_000)],
    "blanks within": [("#" + " " * 90 + "POLLUX" + " " * 90 + "\n", 1000)],
}

# A job of a submission, made by the hook's first file, and how the script's text is put together.
PRELUDE = f"""
slurm = {{ SUCCESS = 0, ERROR = -1, log_user = function(f, ...) string.format(f, ...) end,
  log_info = function(f, ...) end }}
pollux_config = {{ gateway = "https://g", lease_s = 100 }}
dofile("{HOOK}")
local function job_of(script)
  local job = {lua(UNSET | {"tres_per_node": "gres:gpu:1", "environment": {}, "spank_job_env": {}})}
  job.script = script
  return job
end
"""
