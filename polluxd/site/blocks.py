"""Pollux' lines in a site's Lua scripts and in slurm.conf. Pure.

A block is bracketed by two marks. Everything outside the marks is the site's and stays as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

LuaValue = str | float | int | Sequence[str] | Sequence[int]

_BEGIN = (
    "BEGIN Pollux (`polluxctl hooks install` writes these lines; `polluxctl hooks remove` takes them out)"
)
_END = "END Pollux"
_RETURN = re.compile(r"^return\b[^\n]*\s*(?:--\[\[[\s\S]*?\]\]\s*|--[^\n]*\s*)*\Z", re.MULTILINE)
"""The last statement of a script, with the comments after it."""

_JOB_SUBMIT = """\
pollux_config = {{
{settings}
}}
do
  local site_submit, site_modify = slurm_job_submit, slurm_job_modify
  local loaded, fault = pcall(dofile, {hook})
  if not loaded then
    slurm.log_error("pollux: every job passes as a plain Slurm job: %s", tostring(fault))
  end

  -- The site's own function decides first. A fault in Pollux' hook lets the job through.
  local function ask(site, hook, ...)
    local answer = site and site(...) or slurm.SUCCESS
    if not loaded or answer ~= slurm.SUCCESS then
      return answer
    end
    local sound, ours = pcall(hook, ...)
    if sound then
      return ours
    end
    slurm.log_error("pollux: a job passes unchecked: %s", tostring(ours))
    return slurm.SUCCESS
  end

  function slurm_job_submit(...)
    return ask(site_submit, pollux_submit, ...)
  end

  function slurm_job_modify(...)
    return ask(site_modify, pollux_modify, ...)
  end
end
"""

_CLI_FILTER = """\
do
  local site = slurm_cli_pre_submit
  local loaded, fault = pcall(dofile, {hook})
  if not loaded then
    slurm.log_info("pollux: the filter of Pollux jobs is not installed well on this machine: %s", tostring(fault))
  end

  function slurm_cli_pre_submit(...)
    local answer = site and site(...) or slurm.SUCCESS
    if not loaded or answer ~= slurm.SUCCESS then
      return answer
    end
    -- A fault in Pollux' filter lets the job through.
    local sound, ours = pcall(pollux_pre_submit, ...)
    return sound and ours or slurm.SUCCESS
  end

  -- Slurm wants all three functions.
  slurm_cli_setup_defaults = slurm_cli_setup_defaults or function() return slurm.SUCCESS end
  slurm_cli_post_submit = slurm_cli_post_submit or function() return slurm.SUCCESS end
end
"""


def job_submit_block(hooks: str, settings: Mapping[str, LuaValue]) -> str:
    """Return the lines of job_submit.lua: `hooks` is their folder, `settings` the entries of `pollux_config`."""
    pairs = "\n".join(f"  {name} = {_lua(value)}," for name, value in settings.items())
    return _JOB_SUBMIT.format(settings=pairs, hook=json.dumps(f"{hooks}/job_submit.lua"))


def cli_filter_block(hooks: str) -> str:
    return _CLI_FILTER.format(hook=json.dumps(f"{hooks}/cli_filter.lua"))


def with_block(text: str, block: str, comment: str = "--") -> str:
    """Return a site's file with the block in it, in place of an earlier one.

    A last `return` of a Lua script must stay the last statement: the block goes before it.
    """
    bare = without_block(text, comment)
    marked = f"{comment} {_BEGIN}\n{block}{comment} {_END}\n"
    last = _RETURN.search(bare) if comment == "--" else None
    head, tail = (bare[: last.start()], bare[last.start() :]) if last else (bare, "")
    if head and not head.endswith("\n"):
        head += "\n"
    return head + marked + tail


def without_block(text: str, comment: str = "--") -> str:
    begin, end = re.escape(comment) + r" BEGIN Pollux\b", re.escape(f"{comment} {_END}")
    return re.sub(rf"^{begin}.*?^{end}\n", "", text, flags=re.MULTILINE | re.DOTALL)


def _lua(value: LuaValue) -> str:
    if isinstance(value, str | float | int):
        return json.dumps(value)
    return f"{{ {', '.join(json.dumps(each) for each in value)} }}"


def merged_slurm_conf(text: str, plugins: Mapping[str, str], included: str = "") -> tuple[str, list[str]]:
    """Return slurm.conf with these plugins, and what people must do.

    A list is completed on its own line. A key that is missing is added in a block at the end.

    Args:
        plugins: what has to be in the list of each key.
        included: the text of the files that slurm.conf includes; they are read, and not changed.
    """
    text = without_block(text, "#")
    missing, problems = [], []
    for key, plugin in plugins.items():
        line = re.compile(rf"^[ \t]*{key}[ \t]*=[ \t]*(\S+)", re.MULTILINE | re.IGNORECASE)
        found, elsewhere = line.search(text), line.search(included)
        if found is None and elsewhere is None:
            missing.append(f"{key}={plugin}\n")
        elif found is not None and not _lists(found[1], plugin):
            text = text[: found.end(1)] + f",{plugin}" + text[found.end(1) :]
        elif found is None and elsewhere is not None and not _lists(elsewhere[1], plugin):
            problems.append(f"an included file has {key}={elsewhere[1]}: add {plugin} to the list there")
    return (with_block(text, "".join(missing), "#") if missing else text), problems


def _lists(present: str, plugin: str) -> bool:
    # `job_submit/lua` and `lua` name the same plugin.
    return plugin.lower() in [value.rpartition("/")[2] for value in present.lower().split(",")]
