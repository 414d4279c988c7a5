"""The submission hook: what it makes of the #POLLUX lines of a script."""

from __future__ import annotations

import time

import pytest

from polluxd.model import JobSpec
from polluxd.slurm.directives import parse_admin_comment
from tests.unit.slurm.lua_hooks import NEEDS_LUA, Outcome, comment, refused, submit

pytestmark = NEEDS_LUA


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
    assert (outcome.requeue, outcome.gateway, outcome.said) == ("1", "https://g:1", [])


def test_all_keys_over_several_lines_with_a_comment_and_dos_line_ends() -> None:
    outcome = submit(
        "#POLLUX min-gpus=2 max-gpus=8\r\n#POLLUX adaptive=no # as it was\r\n#POLLUX  preemptible=no prior=no\r"
    )
    assert comment(outcome) == "pollux:v1 min-gpus=2 max-gpus=8 adaptive=no preemptible=no cpus-per-gpu=1"
    assert outcome.adaptive == "no"


def test_polluxd_reads_what_the_hook_writes() -> None:
    outcome = submit(
        "#POLLUX max-gpus=8 adaptive=no continue=yes search=lr-1.v2",
        begin_time=4_000_000_000,
        min_mem_per_node=600,
    )
    read = parse_admin_comment(outcome.admin_comment)
    assert read.spec == JobSpec(
        max_gpus=8, adaptive=False, mem_per_gpu_mb=300, continues=True, search="lr-1.v2"
    )
    assert read.begin == 4_000_000_000
    assert read.submitted == pytest.approx(time.time(), abs=60)


@pytest.mark.parametrize(
    ("rule", "noted"),
    [
        ("powers-of-two", "powers-of-two"),
        ("whole-nodes", "whole-nodes"),
        ("multiples-of-8", "multiples-of-8"),
        ("multiples-of-16", "multiples-of-16"),
        ("8,4,1,4,02", "1,2,4,8"),
        ("16", "16"),
        ("any", "any"),
    ],
)
def test_gpu_counts_reach_polluxd(rule: str, noted: str) -> None:
    outcome = submit(f"#POLLUX max-gpus=16 gpu-counts={rule}")
    assert outcome.accepted, outcome.said
    assert ("gpu-counts=" in (outcome.admin_comment or "")) == (noted != "any")
    assert parse_admin_comment(outcome.admin_comment).spec.gpu_counts == noted


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (
            "#POLLUX min-gpu=2",
            "#POLLUX line 3: unknown key 'min-gpu', did you mean min-gpus? "
            "(allowed: min-gpus, max-gpus, gpu-counts, gpu-types, adaptive, "
            "preemptible, prior, mode, resize, continue, search)",
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
        ("#POLLUX mode=watch", "bad value 'watch' for mode (allowed: observe, advise or enforce)"),
        ("#POLLUX resize=or", "bad value 'or' for resize (allowed: in-place or requeue)"),
        ("#POLLUX resize=relaunch", "in-place or requeue"),
        ("#POLLUX continue=maybe", "bad value 'maybe' for continue"),
        ("#POLLUX adaptive", "#POLLUX line 3: expected key=value, got 'adaptive'"),
        ("#POLLUX min_gpus=2", "unknown key 'min_gpus', did you mean min-gpus?"),
        ("#POLLUX --Max-GPU=2", "unknown key '--Max-GPU', did you mean max-gpus?"),
        ("#POLLUX workers=2", "unknown key 'workers' (allowed: min-gpus"),
        ("#POLLUX min-gpus = 2", "write key=value without spaces around the =, got 'min-gpus = 2'"),
        ("#POLLUX adaptive=no min-gpus= 2", "without spaces around the ="),
        ("#POLLUX min-gpus=1,max-gpus=16", "separate directives by spaces, not by commas"),
        ("#POLLUX =3", "#POLLUX line 3: expected key=value, got '=3'"),
        (
            "#POLLUX min-gpus=1\n#POLLUX min-gpus=2",
            "#POLLUX line 4: key 'min-gpus' is given twice (first: #POLLUX line 3)",
        ),
        ("#POLLUX max-gpus=2\n\n#POLLUX min-gpus=4", "#POLLUX line 5: min-gpus=4 is above max-gpus=2"),
        ("#POLLUX min-gpus=%d", "bad value '%d' for min-gpus"),
        (
            "#POLLUX\n#POLLUX gpu-counts=odd",
            "#POLLUX line 4: bad value 'odd' for gpu-counts "
            "(allowed: any, powers-of-two, whole-nodes, multiples-of-8 (from 1 to 64), or a list of counts such as "
            "1,2,4,8)",
        ),
        ("#POLLUX gpu-counts=multiples-of-0", "bad value 'multiples-of-0' for gpu-counts"),
        ("#POLLUX gpu-counts=multiples-of-65", "bad value 'multiples-of-65' for gpu-counts"),
        ("#POLLUX gpu-counts=multiples-of-", "bad value 'multiples-of-' for gpu-counts"),
        ("#POLLUX gpu-counts=multiples-of-8x", "bad value 'multiples-of-8x' for gpu-counts"),
        ("#POLLUX max-gpus=7 gpu-counts=multiples-of-8", "no count of gpu-counts=multiples-of-8 is within"),
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
        "#POLUX min-gpus=2",
        "#PULLUX max_gpus=2",
        "#POLUX",
        "#pollux",
    ],
)
def test_a_mistyped_directive_is_pointed_out(line: str) -> None:
    outcome = submit(line)
    assert outcome.accepted
    assert outcome.admin_comment is None
    assert len(outcome.said) == 1
    assert "line 3 has no effect; did you mean '#POLLUX key=value'" in outcome.said[0]


@pytest.mark.parametrize(
    "line",
    ["##POLLUX min-gpus=2", "# pollux is a scheduler", "# about Pollux: x=1", "#pollux4", "#POLISH words=2"],
)
def test_a_comment_is_a_comment(line: str) -> None:
    outcome = submit(line)
    assert outcome.accepted
    assert outcome.said == []


def test_a_maximum_below_the_gpus_asked_for_is_told_of() -> None:
    outcome = submit("#POLLUX max-gpus=1", tres_per_node="gres:gpu:4")
    assert outcome.accepted
    assert outcome.said == ["note: max-gpus=1 is below the 4 GPUs asked for: the job gets at most 1"]
    assert submit("#POLLUX max-gpus=4", tres_per_node="gres:gpu:4").said == []


@pytest.mark.parametrize("mode", ["observe", "advise", "enforce"])
def test_a_job_that_is_only_looked_at_has_one_batch_size(mode: str) -> None:
    for directives in (f"mode={mode} max-gpus=4", f"mode={mode} adaptive=yes"):
        outcome = submit(f"#POLLUX {directives}")
        assert outcome.mode == mode
        assert parse_admin_comment(comment(outcome)).spec.adaptive is (mode == "enforce")


@pytest.mark.parametrize(
    ("key", "default", "other"),
    [
        ("adaptive", "yes", "no"),
        ("prior", "yes", "no"),
        ("mode", "enforce", "observe"),
        ("resize", "in-place", "requeue"),
        ("continue", "no", "yes"),
    ],
)
def test_a_choice_has_a_default_and_is_inherited_from_no_other_job(
    key: str, default: str, other: str
) -> None:
    outer = {"SLURM_OPEN_MODE": "a", f"POLLUX_{key.upper()}": other}
    made = [submit(head, environment=outer) for head in ("#POLLUX", f"#POLLUX {key}={other}")]
    assert [getattr(outcome, key.replace("continue", "continues")) for outcome in made] == [default, other]


def test_the_search_of_a_job_is_a_name() -> None:
    assert submit("#POLLUX search=lr-1.v2").search == "lr-1.v2"
    for name in ("../x", ".x", "a/b", "x" * 65, "a,b", ""):
        assert "a name of at most 64 letters" in refused(submit(f"#POLLUX search={name}"))


def test_a_search_is_inherited_from_the_shell_and_from_no_pollux_job() -> None:
    shell = {"SLURM_OPEN_MODE": "a", "POLLUX_SEARCH": "lr"}
    assert submit("", environment=shell).search == "lr"
    inside = {**shell, "POLLUX_SUBMITTED": "17"}
    assert submit("", environment=inside).search == ""
    assert submit("#POLLUX search=own", environment=inside).search == "own"


def option(text: str) -> dict[int, str]:
    """Slurm's list of SPANK options, which starts at 0."""
    return {0: "OTHER=1", 1: f"_SLURM_SPANK_OPTION_pollux_pollux={text}"}


def test_the_option_and_the_environment_opt_in_without_a_line() -> None:
    assert comment(submit("", spank_job_env=option("min-gpus=2 max-gpus=8"))).startswith(
        "pollux:v1 min-gpus=2 max-gpus=8 "
    )
    assert comment(submit("", environment={"SBATCH_POLLUX": "yes", "SLURM_OPEN_MODE": "a"})) == comment(
        submit("#POLLUX")
    )


def test_the_option_wins_over_the_environment_and_the_environment_over_the_script_key_by_key() -> None:
    outcome = submit(
        "#POLLUX min-gpus=1 max-gpus=4 adaptive=no",
        environment={"SBATCH_POLLUX": "min-gpus=2 max-gpus=8", "SLURM_OPEN_MODE": "a"},
        spank_job_env=option("max-gpus=16"),
    )
    assert comment(outcome).startswith("pollux:v1 min-gpus=2 max-gpus=16 adaptive=no ")


def test_no_makes_a_plain_job_of_a_script_with_directives() -> None:
    outcome = submit("#POLLUX min-gpus=2", spank_job_env=option("no"))
    assert (outcome.accepted, outcome.admin_comment, outcome.begin_time) == (True, None, 0.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("min-gpu=2", "--pollux: unknown key 'min-gpu'"),
        ("min-gpus=2 min-gpus=3", "--pollux: key 'min-gpus' is given twice (first: --pollux)"),
        ("min-gpus=two", "--pollux: bad value 'two' for min-gpus"),
        ("", "--pollux: expected key=value, or yes, or no, got nothing"),
        ("max-gpus=1", "#POLLUX line 3: min-gpus=2 is above max-gpus=1 (--pollux)"),
    ],
)
def test_a_wrong_option_is_refused_by_the_name_of_its_source(text: str, said: str) -> None:
    assert refused(submit("#POLLUX min-gpus=2", spank_job_env=option(text))).startswith(said)


@pytest.mark.parametrize(
    "types",
    ["a" * 65, ",".join(f"{letter}{'a' * 63}" for letter in "abcdefgh"), ",".join("abcdefghijklmnopq")],
)
def test_gpu_types_have_an_end(types: str) -> None:
    assert "bad value" in refused(submit(f"#POLLUX gpu-types={types}"))


def test_the_longest_gpu_types() -> None:
    types = ",".join(f"{letter}{'a' * 63}" for letter in "abcdefg")
    assert f"gpu-types={types}" in comment(submit(f"#POLLUX gpu-types={types}"))


def test_a_pollux_job_learns_where_the_gateways_are() -> None:
    outcome = submit("#POLLUX", {"gateway": "https://a:1,https://b:1", "gateway_ca": "/etc/pollux/ca.pem"})
    assert (outcome.gateway, outcome.gateway_ca) == ("https://a:1,https://b:1", "/etc/pollux/ca.pem")
    assert submit("#POLLUX", {"gateway_ca": None}).gateway_ca == ""


def test_a_job_from_within_a_pollux_job_inherits_nothing_of_it() -> None:
    inherited = {
        "POLLUX_GATEWAY": "https://g:1",
        "POLLUX_GATEWAY_CA": "/ca",
        "POLLUX_TOKEN": "{}",
        "POLLUX_SUBMITTED": "17",
        "SLURM_OPEN_MODE": "a",
    }
    plain = submit("", environment=inherited)
    assert (plain.accepted, plain.gateway, plain.gateway_ca, plain.token) == (True, "", "", "")
    another = submit("#POLLUX", environment=inherited)
    assert (another.gateway, another.gateway_ca, another.token) == ("https://g:1", "", "")
    untouched = submit("", environment={})
    assert (untouched.gateway, untouched.token) == (None, None)
    line = f"#POLLUX companion-of=7 attempt=0 move=3 nonce={'a' * 32}"
    companion = submit(line, environment=inherited)
    assert (companion.accepted, companion.gateway, companion.token) == (True, "", "")


@pytest.mark.parametrize(
    ("trains", "size", "noted"),
    [
        ("pollux run train.py", None, False),
        ("# srun pollux wrap\n/opt/pollux/bin/python train.py", None, False),
        ("exec pollux wrap --checkpoints 'out/*' -- srun torchrun train.py", 2, False),
        ("pollux run a.py\npollux \t wrap -- b", 2, False),
        ("pollux wrapped", None, False),
        ("srun torchrun train.py", 2, True),
        ("# pollux run train.py\nsrun torchrun train.py # no pollux wrap", 2, True),
    ],
)
def test_a_script_that_polluxd_cannot_see_into_starts_on_its_users_size(
    trains: str, size: int | None, noted: bool
) -> None:
    outcome = submit("#POLLUX max-gpus=8", trains=trains)
    assert outcome.accepted
    assert parse_admin_comment(outcome.admin_comment).spec.own_size == size
    assert [note for note in outcome.said if "the job stays on its 2 GPUs" in note] == outcome.said
    assert bool(outcome.said) is noted
