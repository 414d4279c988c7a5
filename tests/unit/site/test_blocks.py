"""Pollux' lines in a site's Lua scripts and in slurm.conf."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from polluxd.site.blocks import (
    cli_filter_block,
    job_submit_block,
    merged_slurm_conf,
    with_block,
    without_block,
)
from tests.unit.slurm.lua_hooks import HOOK, LUA, NEEDS_LUA

STUB = """
local logged = {}
slurm = { SUCCESS = 0, ERROR = -1, log_user = function() end }
slurm.log_info = function(f, ...) logged[#logged + 1] = f:format(...) end
slurm.log_error = slurm.log_info
"""
CALLS = """
print(slurm_job_submit({ script = SCRIPT, environment = {}, tres_per_node = "gres:gpu:1" }, nil, 1000))
print(slurm_job_modify({ name = "new" }, { job_id = 7, admin_comment = "pollux:v1 min-gpus=1" }, nil, 1000))
for _, line in ipairs(logged) do print(line) end
"""
SITE = "function slurm_job_submit(job)\n  return tonumber(job.site_answer or 0)\nend\n"


def run_lua(text: str, **options: object) -> list[str]:
    assert LUA is not None
    done = subprocess.run([LUA, "-"], input=text, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def script(folder: Path, *, site: str = "", job: str = "#!/bin/sh\\n#POLLUX min-gpus=0\\n") -> str:
    text = with_block(site, job_submit_block(str(folder), {"gateway": "https://g:1"}))
    return STUB + f'SCRIPT = "{job}"\n' + text + CALLS


@NEEDS_LUA
def test_a_sound_hook_decides():
    said = run_lua(script(HOOK.parent))
    assert said[:2] == ["-1", "-1"]  # min-gpus=0 is no number of GPUs; the name is polluxd's to change


@NEEDS_LUA
@pytest.mark.parametrize("fault", ["missing", "syntax", "raises", "a folder", "a part is missing"])
def test_a_hook_that_cannot_be_loaded_lets_every_job_through(tmp_path, fault):
    folder = tmp_path / "hooks"
    folder.mkdir()
    match fault:
        case "syntax":
            (folder / "job_submit.lua").write_text("function (")
        case "raises":
            (folder / "job_submit.lua").write_text('error("no")')
        case "a folder":
            (folder / "job_submit.lua").mkdir()
        case "a part is missing":
            (folder / "job_submit.lua").write_text(HOOK.read_text())
    accepted, changed, *logged = run_lua(script(folder))
    assert (accepted, changed) == ("0", "0")
    assert len(logged) == 1
    assert "every job passes as a plain Slurm job" in logged[0]


@NEEDS_LUA
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_unreadable_hook_lets_every_job_through(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "job_submit.lua").write_text(HOOK.read_text())
    (tmp_path / "job_submit.lua").chmod(0o600)
    accepted, changed, *logged = run_lua(script(tmp_path), user="nobody", cwd="/")
    assert (accepted, changed, len(logged)) == ("0", "0", 1)


@NEEDS_LUA
def test_a_hook_that_fails_on_a_job_lets_it_through(tmp_path):
    (tmp_path / "job_submit.lua").write_text(
        "function pollux_submit() return nil + 1 end\nfunction pollux_modify() return nil + 1 end"
    )
    accepted, changed, *logged = run_lua(script(tmp_path))
    assert (accepted, changed) == ("0", "0")
    assert [line.partition(":")[0] for line in logged] == ["pollux", "pollux"]
    assert "passes unchecked" in logged[0]


@NEEDS_LUA
@pytest.mark.parametrize(
    "last",
    [
        *("", "return slurm.SUCCESS\n", "return slurm.SUCCESS"),
        "return slurm.SUCCESS\n\n-- vim: set ts=2:\n--[[ the\nend ]]\n",
    ],
)
def test_the_sites_own_function_decides_first(last):
    text = STUB + with_block(SITE + last, job_submit_block(str(HOOK.parent), {}))
    ask = 'print(slurm_job_submit({ site_answer = -7, script = "#!/bin/sh" }, nil, 1000))\n'
    # A script that ends with `return` cannot be followed by the test's own lines.
    text = text.removesuffix(last) + ask if last else text + ask
    assert run_lua(text) == ["-7"]


@NEEDS_LUA
def test_a_broken_filter_changes_no_submission(tmp_path):
    text = STUB + with_block("", cli_filter_block(str(tmp_path)))
    text += 'print(slurm_cli_pre_submit({ type = "sbatch" }, 0), slurm_cli_setup_defaults(), slurm_cli_post_submit())\n'
    assert run_lua(text) == ["0\t0\t0"]


@NEEDS_LUA
def test_the_filter_can_refuse_and_a_fault_in_it_cannot(tmp_path):
    text = STUB + with_block("", cli_filter_block(str(tmp_path)))
    ask = 'print(slurm_cli_pre_submit({ type = "sbatch" }, 0))\n'
    for body, answer in (("return -1", "-1"), ("return 0", "0"), ("return nil + 1", "0")):
        (tmp_path / "cli_filter.lua").write_text(f"function pollux_pre_submit() {body} end")
        assert run_lua(text + ask)[0] == answer


@pytest.mark.parametrize("site", ["", SITE, SITE + "return slurm.SUCCESS\n"])
def test_a_block_is_replaced_and_removed_whole(site):
    once = with_block(site, "first\n")
    assert with_block(once, "first\n") == once
    assert "first" not in with_block(once, "second\n")
    assert without_block(once) == site


SLURM_CONF = "ClusterName=c\njobsubmitplugins = require_timelimit # ours\n"
PLUGINS = {"JobSubmitPlugins": "lua", "CliFilterPlugins": "lua"}


def test_slurm_conf_gets_what_is_missing_and_keeps_what_is_there():
    merged, problems = merged_slurm_conf(SLURM_CONF, PLUGINS)
    assert "jobsubmitplugins = require_timelimit,lua # ours\n" in merged
    assert "CliFilterPlugins=lua\n" in merged
    assert problems == []
    assert merged_slurm_conf(merged, PLUGINS) == (merged, [])


def test_what_an_included_file_has_is_not_added():
    merged, problems = merged_slurm_conf(
        "include more.conf\n", PLUGINS, "JobSubmitPlugins=job_submit/lua\nCliFilterPlugins=site\n"
    )
    assert merged == "include more.conf\n"
    assert problems == ["an included file has CliFilterPlugins=site: add lua to the list there"]
