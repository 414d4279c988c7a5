"""The submission hook under a real Lua 5.1, the version that Slurm's plugin embeds, with `slurm` stubbed."""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from polluxd.slurm.directives import parse_admin_comment
from polluxd.slurm.protocol import Companion

HOOK = Path(__file__).resolve().parents[3] / "slurm_hooks" / "job_submit.lua"
LUA = next((found for name in ("lua5.1", "lua5.3", "lua5.4", "lua") if (found := shutil.which(name))), None)

pytestmark = pytest.mark.skipif(LUA is None, reason="needs a Lua interpreter (Debian: lua5.1)")

DRIVER = """
local said = {{}}
slurm = {{ SUCCESS = 0, ERROR = -1,
  log_user = function(f, ...) said[#said + 1] = string.format(f, ...) end,
  log_info = function(f, ...) end }}
pollux_config = {config}
dofile("{hook}")
local job = {job}
local rc = {call}
print(rc)
print(#said)
for _, text in ipairs(said) do print((string.gsub(text, "\\n", " "))) end
for _, key in ipairs({{"admin_comment", "begin_time", "requeue", "tres_per_job"}}) do
  print(tostring(job[key]))
end
for _, key in ipairs({{"POLLUX_TICKET_DIR", "POLLUX_ADAPTIVE", "POLLUX_PRIOR", "POLLUX_MODE", "POLLUX_RESIZE"}}) do
  print(tostring(job.environment and job.environment[key]))
end
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
    ticket_dir: str | None
    adaptive: str | None = None
    prior: str | None = None
    mode: str | None = None
    resize: str | None = None


def lua(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f'["{k}"] = {lua(v)}' for k, v in value.items() if v is not None) + "}"
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
    assert LUA is not None
    driver = DRIVER.format(config=lua(config), hook=HOOK, job=lua(job), call=call)
    done = subprocess.run([LUA, "-"], input=driver, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    said = lines[2 : 2 + int(lines[1])]
    rest = [None if text == "nil" else text for text in lines[2 + int(lines[1]) :]]
    return Outcome(lines[0] == "0", said, rest[0], float(rest[1] or 0), rest[2] or "", *rest[3:])


def submit(head: str, config: dict[str, object] | None = None, **job: object) -> Outcome:
    script = f"#!/bin/bash\n#SBATCH --gres=gpu:2\n{head}\nsrun hostname\n"
    fields = (
        UNSET
        | {"tres_per_node": "gres:gpu:2", "script": script, "environment": {"SLURM_OPEN_MODE": "a"}}
        | job
    )
    return run(
        "slurm_job_submit(job, nil, 1000)", fields, {"ticket_dir": "/run/t", "lease_s": 100} | (config or {})
    )


def refused(outcome: Outcome) -> str:
    assert not outcome.accepted
    assert outcome.admin_comment is None
    assert len(outcome.said) == 1
    return outcome.said[0]


def comment(outcome: Outcome) -> str:
    """The AdminComment without the time of submission."""
    assert outcome.accepted, outcome.said
    assert outcome.admin_comment is not None
    words = outcome.admin_comment.split()
    assert abs(int(next(w for w in words if w.startswith("submitted="))[10:]) - time.time()) < 60
    return " ".join(w for w in words if not w.startswith("submitted="))


def test_a_job_without_directives_is_left_entirely_alone() -> None:
    outcome = submit("##POLLUX min-gpus=2\n#POLLUXX\n## a comment", array_inx="1-3", requeue=0)
    assert outcome == Outcome(True, [], None, 0.0, "0", None, None)


def test_a_job_without_a_batch_script_is_left_alone() -> None:
    outcome = submit("", script=None)
    assert (outcome.accepted, outcome.said, outcome.admin_comment) == (True, [], None)


def test_defaults() -> None:
    outcome = submit("#POLLUX")
    assert comment(outcome) == "pollux:v1 min-gpus=1 adaptive=yes preemptible=yes cpus-per-gpu=1"
    assert outcome.begin_time == pytest.approx(time.time() + 100, abs=60)
    assert (outcome.requeue, outcome.ticket_dir, outcome.said) == ("1", "/run/t", [])


def test_all_keys_over_several_lines_with_a_comment_and_dos_line_ends() -> None:
    outcome = submit(
        "#POLLUX min-gpus=2 max-gpus=8\r\n#POLLUX adaptive=no # as it was\r\n#POLLUX  preemptible=no\r"
    )
    assert comment(outcome) == "pollux:v1 min-gpus=2 max-gpus=8 adaptive=no preemptible=no cpus-per-gpu=1"
    assert outcome.adaptive == "no"


def test_earlier_runs_count_unless_the_job_opts_out() -> None:
    assert submit("#POLLUX").prior == "yes"
    outcome = submit("#POLLUX prior=no")
    assert outcome.prior == "no"
    assert "prior" not in comment(outcome)  # the scheduler has no use for it


def test_polluxd_reads_what_the_hook_writes() -> None:
    outcome = submit("#POLLUX max-gpus=8 adaptive=no", begin_time=4_000_000_000, min_mem_per_node=600)
    read = parse_admin_comment(outcome.admin_comment or "")
    assert read is not None
    assert (read.spec.min_gpus, read.spec.max_gpus, read.spec.adaptive, read.spec.preemptible) == (
        1,
        8,
        False,
        True,
    )
    assert read.spec.mem_per_gpu_mb == 300
    assert read.begin == 4_000_000_000
    assert read.submitted == pytest.approx(time.time(), abs=60)


@pytest.mark.parametrize(
    ("rule", "noted"),
    [
        ("powers-of-two", "powers-of-two"),
        ("whole-nodes", "whole-nodes"),
        ("8,4,1,4,02", "1,2,4,8"),
        ("16", "16"),
        ("any", "any"),
    ],
)
def test_gpu_counts_reach_polluxd(rule: str, noted: str) -> None:
    outcome = submit(f"#POLLUX max-gpus=16 gpu-counts={rule}")
    assert outcome.accepted, outcome.said
    assert ("gpu-counts=" in (outcome.admin_comment or "")) == (noted != "any")
    read = parse_admin_comment(outcome.admin_comment or "")
    assert read is not None
    assert read.spec.gpu_counts == noted


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (
            "#POLLUX min-gpu=2",
            "#POLLUX line 3: unknown key 'min-gpu' (allowed: min-gpus, max-gpus, gpu-counts, adaptive, preemptible, "
            "prior, mode, resize)",
        ),
        (
            "#POLLUX\n#POLLUX min-gpus=two",
            "#POLLUX line 4: bad value 'two' for min-gpus (allowed: a whole number of GPUs from 1 up)",
        ),
        (
            "#POLLUX max-gpus=0",
            "#POLLUX line 3: bad value '0' for max-gpus (allowed: a whole number of GPUs from 1 up)",
        ),
        ("#POLLUX max-gpus=-1", "bad value '-1' for max-gpus"),
        ("#POLLUX max-gpus=1e3", "bad value '1e3' for max-gpus"),
        ("#POLLUX max-gpus=", "bad value '' for max-gpus"),
        ("#POLLUX adaptive=maybe", "#POLLUX line 3: bad value 'maybe' for adaptive (allowed: yes or no)"),
        ("#POLLUX adaptive", "#POLLUX line 3: expected key=value, got 'adaptive'"),
        ("#POLLUX =3", "#POLLUX line 3: expected key=value, got '=3'"),
        (
            "#POLLUX min-gpus=1\n#POLLUX min-gpus=2",
            "#POLLUX line 4: key 'min-gpus' is given twice (first on line 3)",
        ),
        ("#POLLUX max-gpus=2\n\n#POLLUX min-gpus=4", "#POLLUX line 5: min-gpus=4 is above max-gpus=2"),
        ("#POLLUX min-gpus=%d", "bad value '%d' for min-gpus"),
        (
            "#POLLUX\n#POLLUX gpu-counts=odd",
            "#POLLUX line 4: bad value 'odd' for gpu-counts "
            "(allowed: any, powers-of-two, whole-nodes, or a list of counts such as 1,2,4,8)",
        ),
        ("#POLLUX gpu-counts=", "#POLLUX line 3: bad value '' for gpu-counts"),
        ("#POLLUX gpu-counts=1,,2", "bad value '1,,2' for gpu-counts"),
        ("#POLLUX gpu-counts=1,2,", "bad value '1,2,' for gpu-counts"),
        ("#POLLUX gpu-counts=0,1", "bad value '0,1' for gpu-counts"),
        ("#POLLUX gpu-counts=1,2.5", "bad value '1,2.5' for gpu-counts"),
        ("#POLLUX gpu-counts=" + ",".join(map(str, range(1, 66))), "for gpu-counts (allowed: any"),
        (
            "#POLLUX max-gpus=3\n#POLLUX gpu-counts=4,8",
            "#POLLUX line 4: no count of gpu-counts=4,8 is within min-gpus=1 and max-gpus=3",
        ),
        (
            "#POLLUX min-gpus=5 max-gpus=7 gpu-counts=powers-of-two",
            "#POLLUX line 3: no count of gpu-counts=powers-of-two is within min-gpus=5 and max-gpus=7",
        ),
        (
            "#POLLUX min-gpus=9 gpu-counts=1,8",
            "no count of gpu-counts=1,8 is within min-gpus=9 and max-gpus=any",
        ),
    ],
)
def test_a_wrong_directive_is_refused_with_its_line(head: str, message: str) -> None:
    assert message in refused(submit(head))


@pytest.mark.parametrize(
    ("option", "job"),
    [
        ("--array", {"array_inx": "1-3"}),
        ("heterogeneous components", {"het_job_offset": 0}),
        ("--exclusive", {"shared": 0}),
        ("--exclusive", {"shared": 2}),
        ("--constraint", {"features": "a100"}),
        ("--nodelist", {"req_nodes": "n1"}),
        ("--exclude", {"exc_nodes": "n1"}),
        ("--reservation", {"reservation": "maint"}),
        ("--gpus-per-task", {"tres_per_task": "gres:gpu:1"}),
        ("--gpus-per-socket", {"tres_per_socket": "gres:gpu:1"}),
        ("--ntasks-per-gpu", {"ntasks_per_tres": 1}),
        ("--no-requeue", {"requeue": 0}),
        ("--time-min", {"time_min": 10}),
    ],
)
def test_an_option_that_fixes_the_size_or_the_place_is_refused(option: str, job: dict[str, object]) -> None:
    said = refused(submit("#POLLUX", **job))
    assert said.startswith(f"#POLLUX: {option}")
    assert "cannot be used by a Pollux job" in said


@pytest.mark.parametrize(
    "job",
    [
        {"dependency": "afterok:5"},
        {"begin_time": 4_000_000_000},
        {"requeue": 1},
        {"shared": 1},
        {"priority": 0},
        {"time_limit": 60},
        {"licenses": "matlab"},
        {"tres_per_task": "cpu=2"},  # what --cpus-per-task is from Slurm 24.11 on
    ],
)
def test_what_does_not_fix_the_size_is_accepted(job: dict[str, object]) -> None:
    assert submit("#POLLUX", **job).accepted


def test_the_lease_starts_from_the_users_begin_which_is_kept() -> None:
    outcome = submit("#POLLUX", begin_time=4_000_000_000)
    assert outcome.begin_time == 4_000_000_100
    assert comment(outcome).endswith(" begin=4000000000")


def test_min_gpus_above_the_cluster_is_refused() -> None:
    assert refused(submit("#POLLUX min-gpus=17", {"cluster_gpus": 16})) == (
        "#POLLUX: min-gpus=17 is above the 16 GPUs of this cluster"
    )
    assert submit("#POLLUX min-gpus=16", {"cluster_gpus": 16}).accepted
    assert refused(submit("#POLLUX gpu-counts=24,32", {"cluster_gpus": 16})) == (
        "#POLLUX: gpu-counts=24,32 is above the 16 GPUs of this cluster"
    )
    assert submit("#POLLUX gpu-counts=16,32", {"cluster_gpus": 16}).accepted


@pytest.mark.parametrize(
    ("job", "cpus"),
    [
        ({"tres_per_node": "gres:gpu:2"}, 1),
        ({"tres_per_node": "gres:gpu:2", "cpus_per_task": 8}, 4),
        ({"tres_per_node": "gpu:4", "min_nodes": 2, "ntasks_per_node": 4, "cpus_per_task": 2}, 2),
        ({"tres_per_node": "gres/gpu:3", "num_tasks": 4}, 2),
        ({"tres_per_node": None, "tres_per_job": "gres:gpu:4", "num_tasks": 2, "cpus_per_task": 6}, 3),
        ({"tres_per_node": None, "tres_per_job": "gres:gpu:4", "cpus_per_tres": "gres:gpu:5"}, 5),
        ({"tres_per_node": "gpu"}, 1),
    ],
)
def test_cpus_follow_the_gpus(job: dict[str, object], cpus: int) -> None:
    assert f"cpus-per-gpu={cpus}" in comment(submit("#POLLUX", **job)).split()


def test_a_job_that_asks_for_no_gpu_asks_for_the_least_it_may_have() -> None:
    assert submit("#POLLUX min-gpus=3", tres_per_node=None).tres_per_job == "gres:gpu:3"
    assert submit("#POLLUX min-gpus=3").tres_per_job is None
    for rule, least in (("powers-of-two", 4), ("8,5", 5), ("whole-nodes", 3)):
        outcome = submit(f"#POLLUX min-gpus=3 gpu-counts={rule}", tres_per_node=None)
        assert outcome.tres_per_job == f"gres:gpu:{least}"


@pytest.mark.parametrize("text", ["gres:gpu:a100:2", "gres:nic:1", "gpu:a100", "gres:gpu:1,gres:nic:1"])
def test_typed_or_other_resources_are_refused(text: str) -> None:
    assert f"got '{text}'" in refused(submit("#POLLUX", tres_per_node=text))


def test_no_gpus_at_all_is_refused() -> None:
    assert "at least one GPU" in refused(submit("#POLLUX", tres_per_node="gres:gpu:0"))


def test_a_directive_behind_the_first_command_is_pointed_out() -> None:
    outcome = submit("echo hello\n#POLLUX min-gpus=2")
    assert outcome.accepted
    assert outcome.admin_comment is None
    assert outcome.said == [
        "note: the #POLLUX line 4 comes after the first command of the script and has no effect"
    ]


@pytest.mark.parametrize(
    "line",
    [
        "#pollux min-gpus=2",
        "# POLLUX min-gpus=2",
        "#Pollux: max-gpus=4",
        "#POLLUX,min-gpus=1",
        "  #POLLUX min-gpus=2",
        "#POLLUXmin-gpus=2",
        "#pollux",
    ],
)
def test_a_mistyped_directive_is_pointed_out(line: str) -> None:
    outcome = submit(line)
    assert outcome.accepted
    assert outcome.admin_comment is None
    assert len(outcome.said) == 1
    assert "line 3 looks like a Pollux directive and is none" in outcome.said[0]


@pytest.mark.parametrize(
    "line", ["##POLLUX min-gpus=2", "# pollux is a scheduler", "# about Pollux: x=1", "#pollux4"]
)
def test_a_comment_is_a_comment(line: str) -> None:
    outcome = submit(line)
    assert outcome.accepted
    assert outcome.said == []


@pytest.mark.parametrize(
    ("beat", "waits"),
    [
        (lambda: f"{time.time():.0f}\n", True),
        (lambda: f"{time.time() - 300:.0f}\n", False),
        (lambda: "", False),
    ],
)
def test_no_lease_while_polluxd_is_dead(tmp_path: Path, beat: object, waits: bool) -> None:
    heartbeat = tmp_path / "heartbeat"
    heartbeat.write_text(beat())  # type: ignore[operator]
    config: dict[str, object] = {"heartbeat_file": str(heartbeat), "heartbeat_stale_s": 60}
    outcome = submit("#POLLUX", config)
    assert comment(outcome).startswith("pollux:v1 ")
    assert (outcome.begin_time > 0) is waits
    assert submit("#POLLUX", config, begin_time=4_000_000_000).begin_time == 4_000_000_000 + (
        100 if waits else 0
    )
    heartbeat.unlink()
    assert submit("#POLLUX", config).begin_time == 0


def test_an_output_file_that_a_re_allocation_would_empty_is_pointed_out_or_refused() -> None:
    (note,) = submit("#POLLUX", environment={}).said
    assert "--open-mode=append" in note
    assert submit("#POLLUX", {"log_appends": "yes"}, environment={}).said == []
    assert "--open-mode=truncate" in refused(submit("#POLLUX", environment={"SLURM_OPEN_MODE": "t"}))


FILTER = HOOK.with_name("cli_filter.lua")


def filtered(options: dict[str, object]) -> str:
    """The open mode that the filter makes of sbatch's options."""
    assert LUA is not None
    driver = f"""
    slurm = {{ SUCCESS = 0 }}
    dofile("{FILTER}")
    local options = {lua(options)}
    assert(slurm_cli_pre_submit(options, 0) == 0)
    print(options["open-mode"])
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


@pytest.mark.parametrize(
    ("name", "update"),
    [
        ("StartTime", {"begin_time": 1_800_000_000}),
        ("NumNodes", {"min_nodes": 2}),
        ("ReqNodeList", {"req_nodes": "n1"}),
        ("TresPerNode", {"tres_per_node": "gres:gpu:4"}),
        ("NumTasks", {"num_tasks": 4}),
        ("Requeue", {"requeue": 0}),
    ],
)
def test_a_user_cannot_change_the_geometry_or_the_lease(name: str, update: dict[str, object]) -> None:
    outcome = modify(update)
    assert not outcome.accepted
    assert outcome.said == [f"pollux: {name} of job 7 is polluxd's to change"]
    assert modify(update, uid=0).accepted
    assert modify(update, uid=990).accepted
    assert modify(update, comment=None).accepted
    assert modify(update, comment="see ticket 12, not pollux:").accepted


@pytest.mark.parametrize("update", [{"priority": 0}, {"time_limit": 10}, {"name": "new"}, {"comment": "x"}])
def test_a_user_may_change_the_rest(update: dict[str, object]) -> None:
    assert modify(update).accepted


def test_a_job_submitted_from_within_another_does_not_inherit_its_adaptivity() -> None:
    outer = {"SLURM_OPEN_MODE": "a", "POLLUX_ADAPTIVE": "no"}
    assert submit("#POLLUX", environment=outer).adaptive == "yes"
    assert submit("#POLLUX adaptive=no", environment=outer).adaptive == "no"


@pytest.mark.parametrize("mode", ["observe", "advise"])
def test_a_job_that_is_only_looked_at_has_one_batch_size(mode: str) -> None:
    outcome = submit(f"#POLLUX mode={mode} max-gpus=4")
    assert outcome.mode == mode
    read = parse_admin_comment(comment(outcome))
    assert read is not None
    assert not read.spec.adaptive
    assert not parse_admin_comment(comment(submit(f"#POLLUX mode={mode} adaptive=yes"))).spec.adaptive  # type: ignore[union-attr]


def test_enforce_is_the_default_and_is_inherited_from_nowhere() -> None:
    outer = {"SLURM_OPEN_MODE": "a", "POLLUX_MODE": "observe"}
    for outcome in (submit("#POLLUX", environment=outer), submit("#POLLUX mode=enforce")):
        assert outcome.mode == "enforce"
        assert "adaptive=yes" in comment(outcome)
    wrong = submit("#POLLUX mode=watch")
    assert not wrong.accepted
    assert "bad value 'watch' for mode (allowed: observe, advise or enforce)" in " ".join(wrong.said)


def test_how_a_job_may_be_resized_is_bounded_by_its_user_and_inherited_from_nowhere() -> None:
    outer = {"SLURM_OPEN_MODE": "a", "POLLUX_RESIZE": "requeue"}
    assert submit("#POLLUX", environment=outer).resize == "in-place"
    assert submit("#POLLUX resize=relaunch", environment=outer).resize == "relaunch"
    wrong = submit("#POLLUX resize=or")
    assert "bad value 'or' for resize (allowed: in-place, relaunch or requeue)" in " ".join(wrong.said)


COMPANION = "#POLLUX companion-of=12 attempt=0 reallocation=345"


def test_a_companion_waits_for_polluxd_which_reads_whose_it_is() -> None:
    before = int(time.time())
    outcome = submit(COMPANION, requeue=0, min_nodes=2, cpus_per_task=4, num_tasks=2, min_mem_per_node=600)
    assert (outcome.accepted, outcome.requeue, outcome.ticket_dir, outcome.said) == (True, "0", "", [])
    assert before + 100 <= outcome.begin_time <= time.time() + 100
    read = parse_admin_comment(outcome.admin_comment or "")
    assert read is not None
    assert read.companion == Companion(12, 0, 345)
    assert (read.spec.cpus_per_gpu, read.spec.mem_per_gpu_mb) == (2, 300)
    assert read.submitted is not None
    assert before <= read.submitted <= time.time()
    assert submit(COMPANION).requeue == "0", "whatever sbatch was told"


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (
            "#POLLUX companion-of=12 attempt=0",
            "a companion has companion-of=JOB attempt=RESTARTS reallocation=ID",
        ),
        ("#POLLUX companion-of=x attempt=0 reallocation=3", "a companion has"),
        (f"#POLLUX companion-of={'9' * 16} attempt=0 reallocation=3", "a companion has"),
        (COMPANION + " min-gpus=2", "a companion has"),
        ("#POLLUX min-gpus=2\n" + COMPANION, "no other directive"),
        (COMPANION + "\n#POLLUX mode=observe", "no other directive"),
    ],
)
def test_a_companion_says_whose_it_is_and_no_more(head: str, message: str) -> None:
    assert message in refused(submit(head))


def test_what_a_companion_cannot_be(tmp_path: Path) -> None:
    assert "--array" in refused(submit(COMPANION, array_inx="1-3"))
    assert "--nodelist" in refused(submit(COMPANION, req_nodes="n1"))
    assert "asks for its GPUs" in refused(submit(COMPANION, tres_per_node=None))
    stale = tmp_path / "heartbeat"
    stale.write_text("1000\n")
    assert "polluxd does not answer" in refused(submit(COMPANION, {"heartbeat_file": str(stale)}))


def test_a_companion_behind_the_first_command_is_an_ordinary_job() -> None:
    outcome = submit("srun true\n" + COMPANION)
    assert (outcome.accepted, outcome.admin_comment) == (True, None)


def test_a_companion_cannot_be_made_one_that_starts_again() -> None:
    whose = "pollux:v1 companion-of=12 attempt=0 reallocation=3 cpus-per-gpu=1 submitted=1"
    outcome = modify({"requeue": 1}, comment=whose)
    assert outcome.said == ["pollux: Requeue of job 7 is polluxd's to change"]
    assert modify({"requeue": 0}, comment=whose).accepted
    assert modify({"requeue": 1}).accepted
    assert not modify({"begin_time": 1_800_000_000}, comment=whose).accepted
