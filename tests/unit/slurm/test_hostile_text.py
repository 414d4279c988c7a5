"""The submission hook: free text of all jobs, and scripts without an end."""

from __future__ import annotations

import pytest

from tests.unit.slurm.lua_hooks import NEEDS_LUA, UNSET, comment, modify, refused, run, submit

pytestmark = NEEDS_LUA

HOSTILE = [
    ("name", "x UserId=a(1) GroupId=b TimeLimit=zz"),
    ("name", "x\nJobId=777777 JobName=y"),
    ("name", "JobId=9"),
    ("name", "x\tAdminComment=pollux:v1"),
    ("name", "\x1b]0;owned\x07"),
    ("name", "x\u009b2J"),
    ("comment", "AdminComment=pollux:v1"),
    ("comment", "a\nb"),
    ("wckey", "Nodes=n[1-4]"),
    ("work_dir", "/home/a\nb"),
    ("std_out", "/home/a\x7f"),
]


@pytest.mark.parametrize(("field", "text"), HOSTILE)
@pytest.mark.parametrize("head", ["#POLLUX min-gpus=1", "# a plain job"])
def test_no_job_may_look_like_a_record(field: str, text: str, head: str) -> None:
    assert f"{field} holds" in refused(submit(head, **{field: text}))


@pytest.mark.parametrize(("field", "text"), HOSTILE)
def test_nor_a_job_without_a_script(field: str, text: str) -> None:
    assert not run("slurm_job_submit(job, nil, 1000)", UNSET | {field: text}, {}).accepted


@pytest.mark.parametrize("name", ["lr=0.1 bs=32", "résumé", "a-b_c.d/e", "x = y", "训练", "user=alice", ""])
def test_ordinary_names_pass(name: str) -> None:
    assert comment(submit("#POLLUX min-gpus=2", name=name, work_dir="/home/a=b/JobId=1"))


def test_a_script_is_read_no_further_than_64_kib() -> None:
    padding = "# x\n" * (65536 // 4)
    assert submit(padding + "#POLLUX min-gpus=2").admin_comment is None
    assert submit("#POLLUX min-gpus=2\n" + padding * 40).admin_comment is not None
    long = "# " + "x" * 60 + "\n"
    assert submit(long * 990 + "#POLLUX min-gpus=2").admin_comment is not None


def test_the_head_of_a_script_has_at_most_1000_lines() -> None:
    assert submit("\n" * 997 + "#POLLUX min-gpus=2").admin_comment is not None
    outcome = submit("\n" * 998 + "#POLLUX min-gpus=2")
    assert outcome.admin_comment is None
    assert outcome.said == ["note: the #POLLUX line 1001 comes after line 1000 and has no effect"]


LONGEST = {
    **dict.fromkeys(("name", "comment", "wckey"), 1024),
    **dict.fromkeys(("work_dir", "std_in", "std_out", "std_err", "array_inx"), 4096),
    **dict.fromkeys(("req_nodes", "exc_nodes"), 8192),
    **dict.fromkeys(("partition", "account", "qos", "reservation", "licenses", "features"), 1024),
    **dict.fromkeys(("tres_per_node", "tres_per_job", "tres_per_task", "tres_per_socket"), 1024),
    **dict.fromkeys(("cpus_per_tres", "mem_per_tres"), 1024),
}


@pytest.mark.parametrize("field", LONGEST)
def test_a_text_has_at_most_what_slurm_itself_takes(field: str) -> None:
    longest = LONGEST[field]
    assert submit("# a plain job", **{field: "n" * longest}).accepted
    said = refused(submit("# a plain job", **{field: "n" * (longest + 1)}))
    assert said == f"{field} has {longest + 1} bytes, at most {longest} are allowed: shorten it"
    assert refused(modify({field: "n" * (longest + 1)}, comment=None)) == said


@pytest.mark.parametrize("field", LONGEST)
def test_the_length_is_compared_before_the_content_is_scanned(field: str) -> None:
    # A function that looks at content would end the run.
    call = """(function()
      local kept = {}
      for _, name in ipairs({"find", "match", "gmatch", "gsub", "sub", "byte", "upper"}) do
        kept[name], string[name] = string[name], function() error(name .. " looked at a text of a user") end
      end
      local rc = pollux_submit(job, nil, 1000)
      for name, original in pairs(kept) do string[name] = original end
      return rc
    end)()"""
    assert "has 40000 bytes" in refused(run(call, {"script": "#!/bin/sh", field: "=" * 40000}, {}))


def test_directives_have_at_most_1024_bytes() -> None:
    long = "min-gpus=2 " + "#" * 1100
    said = refused(submit(f"#POLLUX {long}"))
    assert said == "#POLLUX line 3 has 1111 bytes, at most 1024 are allowed: shorten it"
    said = refused(submit("# a plain job", environment={"SBATCH_POLLUX": long}))
    assert said == "SBATCH_POLLUX has 1111 bytes, at most 1024 are allowed: shorten it"
    # Slurm's list starts at 0.
    option = {0: f"_SLURM_SPANK_OPTION_pollux_pollux={long}"}
    assert "--pollux has 1111 bytes" in refused(submit("# a plain job", spank_job_env=option))


def test_spank_options_are_counted_before_they_are_copied() -> None:
    assert "at most 1024 options" in refused(submit("# a plain job", spank_job_env_size=1025))
    assert submit("# a plain job", spank_job_env_size=1024).accepted


def test_a_message_repeats_no_more_than_200_bytes() -> None:
    assert len(refused(submit("#POLLUX " + "x" * 60000))) < 500
    assert len(refused(submit("#POLLUX companion-of=" + "x" * 60000))) < 500


def test_the_name_of_a_field_is_found_behind_anything() -> None:
    assert "'UserId='" in refused(submit("#POLLUX", comment="x" * 1000 + " 9UserId=0"))
    assert comment(submit("#POLLUX", comment="x" * 40 + "UserId=0"))
