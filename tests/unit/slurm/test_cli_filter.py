"""The filter that chooses the open mode of a script that sbatch is given."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.unit.slurm.lua_hooks import HOOK, LUA, NEEDS_LUA, lua

pytestmark = NEEDS_LUA

FILTER = HOOK.with_name("cli_filter.lua")


def filtered(options: dict[str, object]) -> str:
    """The open mode that the filter makes of sbatch's options, or its refusal."""
    driver = f"""
    slurm = {{ SUCCESS = 0, ERROR = -1, log_error = print }}
    dofile("{FILTER}")
    local options = {lua(options)}
    if slurm_cli_pre_submit(options, 0) == 0 then
      print(options["open-mode"])
    end
    """
    return subprocess.run([LUA, "-"], input=driver, capture_output=True, text=True, check=True).stdout.strip()


def test_sbatch_appends_to_the_output_of_an_opted_in_script(tmp_path: Path) -> None:
    ours, foreign, late = tmp_path / "ours", tmp_path / "foreign", tmp_path / "late"
    ours.write_text("#!/bin/sh\n\n#SBATCH -n1\n#POLLUX\nsrun hostname\n")
    foreign.write_text("#!/bin/sh\n#POLLUXX\n# POLLUX\nsrun hostname\n")
    late.write_text("#!/bin/sh\nsrun hostname\n#POLLUX\n")
    assert filtered({"type": "sbatch", "argv": [str(ours), "x"]}) == "append"
    assert filtered({"type": "sbatch", "argv": [str(ours)], "open-mode": "t"}) == "t"
    for options in (
        {"type": "sbatch", "argv": [str(foreign)]},
        {"type": "sbatch", "argv": [str(late)]},
        {"type": "srun", "argv": [str(ours)]},
        {"type": "sbatch", "argv": []},
        {"type": "sbatch"},
        {"type": "sbatch", "argv": [str(tmp_path / "nowhere")]},
    ):
        assert filtered(dict(options)) == "nil"


def test_a_deadline_is_refused(tmp_path: Path) -> None:
    """job_submit/lua of 22.05 does not see it."""
    ours, plain = tmp_path / "ours", tmp_path / "plain"
    ours.write_text("#!/bin/sh\n#POLLUX\nsrun hostname\n")
    plain.write_text("#!/bin/sh\nsrun hostname\n")
    given = {"type": "sbatch", "deadline": "2026-11-23T19:02:06"}
    for mode in ({}, {"open-mode": "a"}):
        said = filtered(given | mode | {"argv": [str(ours)]})
        assert said.startswith("#POLLUX: --deadline cannot be used by a Pollux job")
    assert filtered(given | {"argv": [str(plain)]}) == "nil"
    # What sbatch 22.05 has where none was given.
    assert filtered({"type": "sbatch", "deadline": "Unknown", "argv": [str(ours)]}) == "append"
