"""The submission hook: sbatch's options and the site's configuration.

Other tests cover the directives.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from polluxd.slurm.directives import parse_admin_comment
from tests.unit.slurm.lua_hooks import NEEDS_LUA, comment, refused, submit

pytestmark = NEEDS_LUA


@pytest.mark.parametrize(
    ("option", "job"),
    [
        ("heterogeneous components", {"het_job_offset": 0}),
        ("--exclusive=user", {"shared": 2}),
        ("--gpus-per-task", {"tres_per_task": "gres:gpu:1"}),
        ("--gpus-per-socket", {"tres_per_socket": "gres:gpu:1"}),
        ("--ntasks-per-gpu", {"ntasks_per_tres": 1}),
        ("--no-requeue", {"requeue": 0}),
        ("--requeue=expedite", {"bitflags": 2**36 + 2**35 + 8}),
        ("--time-min", {"time_min": 10}),
        ("--deadline", {"deadline": 4_000_000_000}),
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
        {"requeue": 1, "bitflags": 2**36 + 8},
        {"shared": 1},
        {"priority": 0},
        {"time_limit": 60},
        {"deadline": 0},
        {"deadline": 4294967294},
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


@pytest.mark.parametrize("mode", ["", ".observe"])
def test_min_gpus_above_the_cluster_is_refused(tmp_path: Path, mode: str) -> None:
    config: dict[str, object] = {"heartbeat_file": str(tmp_path / "heartbeat")}
    beat = tmp_path / f"heartbeat{mode}"
    beat.write_text(f"{time.time():.0f}\n16\n")
    assert refused(submit("#POLLUX min-gpus=17", config)) == (
        "#POLLUX: min-gpus=17 is above the 16 GPUs of this cluster"
    )
    assert submit("#POLLUX min-gpus=16", config).accepted
    assert refused(submit("#POLLUX gpu-counts=24,32", config)) == (
        "#POLLUX: gpu-counts=24,32 is above the 16 GPUs of this cluster"
    )
    assert submit("#POLLUX gpu-counts=16,32", config).accepted
    for unsaid in (f"{time.time():.0f}\n", f"{time.time():.0f}\n0\n", f"{time.time() - 999:.0f}\n16\n"):
        beat.write_text(unsaid)
        assert submit("#POLLUX min-gpus=17", config).accepted


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
    words = comment(submit("#POLLUX", **job)).split()
    assert f"cpus-per-gpu={cpus}" in words
    # Otherwise the site's DefCpuPerGPU holds.
    assert ("cpus-asked=yes" in words) is ("cpus_per_task" in job or "cpus_per_tres" in job)


@pytest.mark.parametrize(
    ("job", "asked", "per_gpu"),
    [
        ({}, False, ""),
        ({"min_mem_per_node": 2.0**64, "min_mem_per_cpu": 2.0**64}, False, ""),
        ({"min_mem_per_node": 0}, True, ""),
        ({"min_mem_per_node": 600}, True, "mem-per-gpu=300"),
        ({"min_mem_per_cpu": 100}, True, ""),
        ({"mem_per_tres": "gres:gpu:500"}, True, ""),
    ],
)
def test_the_comment_tells_all_memory_from_no_option(
    job: dict[str, object], asked: bool, per_gpu: str
) -> None:
    words = comment(submit("#POLLUX", **job)).split()
    assert ("mem-asked=yes" in words) is asked
    assert "".join(word for word in words if word.startswith("mem-per-gpu=")) == per_gpu


def test_a_job_that_asks_for_no_gpu_asks_for_the_least_it_may_have() -> None:
    assert submit("#POLLUX min-gpus=3", tres_per_node=None).tres_per_job == "gres:gpu:3"
    assert submit("#POLLUX min-gpus=3").tres_per_job is None
    for rule, least in (("powers-of-two", 4), ("8,5", 5), ("whole-nodes", 3), ("multiples-of-4", 4)):
        outcome = submit(f"#POLLUX min-gpus=3 gpu-counts={rule}", tres_per_node=None)
        assert outcome.tres_per_job == f"gres:gpu:{least}"


@pytest.mark.parametrize(
    "text", ["gres:nic:1", "gres:gpu:1,gres:nic:1", "gres:gpu:a100:2,gpu:h100:1", "gpu:a b:1"]
)
def test_other_resources_and_several_types_are_refused(text: str) -> None:
    assert f"got '{text}'" in refused(submit("#POLLUX", tres_per_node=text))


@pytest.mark.parametrize(
    ("head", "text", "words"),
    [
        ("#POLLUX", "gres:gpu:a100:2", "cpus-per-gpu=1 gpu-types=a100"),
        ("#POLLUX", "gres/gpu:1g.5gb:4", "cpus-per-gpu=1 gpu-types=1g.5gb"),
        ("#POLLUX", "gpu:4090:2", "cpus-per-gpu=1 gpu-types=4090"),
        ("#POLLUX", "gpu:2080ti", "cpus-per-gpu=1 gpu-types=2080ti"),
        ("#POLLUX gpu-types=h100,a100,h100", "gpu:2", "cpus-per-gpu=1 gpu-types=a100,h100"),
        ("#POLLUX gpu-types=a100,h100", "gpu:a100:2", "cpus-per-gpu=1 gpu-types=a100,h100"),
    ],
)
def test_gpu_types_are_kept(head: str, text: str, words: str) -> None:
    assert comment(submit(head, tres_per_node=text)).endswith(words)


def test_types_that_contradict_each_other_or_are_none_are_refused() -> None:
    said = refused(submit("#POLLUX gpu-types=h100", tres_per_node="gpu:a100:2"))
    assert said == "#POLLUX: --gres asks for 'a100', which gpu-types=h100 leaves out"
    assert "a list of GPU types" in refused(submit("#POLLUX gpu-types=a100,"))


@pytest.mark.parametrize(
    ("job", "word"),
    [
        ({"features": "a100&ib"}, "constraint=a100&ib"),
        ({"features": "(a100|h100)&ib"}, "constraint=(a100|h100)&ib"),
        ({"req_nodes": "n1,n[3-4]"}, "nodelist=n1,n[3-4]"),
        ({"exc_nodes": "n2"}, "exclude=n2"),
        ({"reservation": "course"}, "reservation=course"),
        ({"array_inx": "0-11%4"}, "array-limit=4"),
        ({"pn_min_cpus": 6}, "min-cpus=6"),
        ({"pn_min_tmp_disk": 1000}, "tmp=1000"),
        ({"req_switch": 1}, "switches=1"),
        ({"contiguous": 1}, "contiguous=yes"),
    ],
)
def test_options_that_choose_nodes_are_kept(job: dict[str, object], word: str) -> None:
    assert comment(submit("#POLLUX", **job)).endswith(f"cpus-per-gpu=1 {word}")


def test_an_exclusive_job_gets_whole_nodes() -> None:
    words = comment(submit("#POLLUX", shared=0)).split()
    assert "exclusive=yes" in words
    assert "gpu-counts=whole-nodes" in words


def test_an_array_without_a_limit_has_no_word() -> None:
    assert comment(submit("#POLLUX", array_inx="0-11")).endswith("cpus-per-gpu=1")


@pytest.mark.parametrize(
    ("option", "job"),
    [
        ("--constraint", {"features": "a100*2"}),
        ("--constraint", {"features": "[a|b]"}),
        ("--constraint", {"features": "a&b|c"}),
        ("--constraint", {"features": "(a&b|c)&d"}),
        ("--constraint", {"features": "a max-gpus=9"}),
        ("--constraint", {"features": "a&"}),
        ("--constraint", {"features": "(a"}),
        ("--nodelist", {"req_nodes": "n1 preemptible=no"}),
        ("--exclude", {"exc_nodes": "n1\tx"}),
        ("--reservation", {"reservation": "a,b"}),
        ("--nodelist", {"req_nodes": "n1," * 300}),
    ],
)
def test_forms_that_polluxd_cannot_keep_are_refused(option: str, job: dict[str, object]) -> None:
    said = refused(submit("#POLLUX", **job))
    assert said.startswith(f"#POLLUX: {option} cannot be used by a Pollux job in this form")


def test_no_gpus_at_all_is_refused() -> None:
    assert "at least one GPU" in refused(submit("#POLLUX", tres_per_node="gres:gpu:0"))


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
    heartbeat.write_text(beat())
    config: dict[str, object] = {"heartbeat_file": str(heartbeat), "heartbeat_stale_s": 60}
    outcome = submit("#POLLUX", config)
    assert comment(outcome).startswith("pollux:v1 ")
    assert (outcome.begin_time > 0) is waits
    assert submit("#POLLUX", config, begin_time=4_000_000_000).begin_time == 4_000_000_000 + (
        100 if waits else 0
    )
    heartbeat.unlink()
    assert submit("#POLLUX", config).begin_time == 0


def test_a_polluxd_that_observes_has_agents_observe_too(tmp_path: Path) -> None:
    heartbeat = tmp_path / "heartbeat"
    config: dict[str, object] = {"heartbeat_file": str(heartbeat), "heartbeat_stale_s": 60}
    assert submit("#POLLUX", config).mode == "enforce", "nobody has looked on lately"
    (tmp_path / "heartbeat.observe").write_text(f"{time.time():.0f}\n")
    outcome = submit("#POLLUX", config)
    assert (outcome.mode, outcome.begin_time) == ("observe", 0)
    assert submit("#POLLUX mode=advise", config).mode == "advise", "as the user says"
    heartbeat.write_text(f"{time.time():.0f}\n")
    assert submit("#POLLUX", config).mode == "enforce"


@pytest.mark.parametrize(
    ("job", "size"),
    [
        ({}, "1x2"),
        ({"min_nodes": 2, "tres_per_node": "gres:gpu:4"}, "2x4"),
        ({"min_nodes": 2, "tres_per_node": "", "tres_per_job": "gres:gpu:6"}, "2x3"),
        ({"min_nodes": 2, "tres_per_node": "", "tres_per_job": "gres:gpu:5"}, None),
        ({"tres_per_node": ""}, "1x3"),
        ({"min_nodes": 2, "tres_per_node": ""}, "2x2"),
        ({"min_nodes": 4, "tres_per_node": ""}, "4x1"),
    ],
)
def test_the_size_that_the_user_wrote_goes_into_the_comment(job: dict[str, object], size: str | None) -> None:
    outcome = submit("#POLLUX min-gpus=3", **job)
    found = [word for word in outcome.admin_comment.split() if word.startswith("asked=")]
    assert found == ([f"asked={size}"] if size else [])
    asked = parse_admin_comment(outcome.admin_comment).demands.asked
    assert asked == (tuple(map(int, size.split("x"))) if size else None)


def test_the_site_s_text_in_the_comment_stays() -> None:
    text = "cost centre 7 -- min-gpus=9"
    outcome = submit("#POLLUX min-gpus=2", admin_comment=text)
    assert outcome.admin_comment.endswith(f" -- {text}")
    assert parse_admin_comment(outcome.admin_comment).spec.min_gpus == 2
    long = submit("#POLLUX min-gpus=2", admin_comment="x" * 5000).admin_comment
    assert len(long) == 2048
    assert parse_admin_comment(long) is not None


def test_an_output_file_that_a_re_allocation_would_empty_is_pointed_out_or_refused() -> None:
    (note,) = submit("#POLLUX", environment={}).said
    assert "--open-mode=append" in note
    assert submit("#POLLUX", {"log_appends": "yes"}, environment={}).said == []
    assert "--open-mode=truncate" in refused(submit("#POLLUX", environment={"SLURM_OPEN_MODE": "t"}))


def test_the_comment_tells_of_the_lease_where_the_user_gave_none() -> None:
    waits = submit("#POLLUX min-gpus=1")
    assert waits.comment.startswith("pollux: while the reason is BeginTime")
    assert submit("#POLLUX min-gpus=1", comment="mine").comment == "mine"
    assert submit("").comment is None, "a plain job is left alone"
    dead = {"heartbeat_file": "/no/such/file"}
    assert submit("#POLLUX min-gpus=1", dead).comment is None, "it starts as a plain job"


@pytest.mark.parametrize(
    ("job", "complaint"),
    [
        (
            {"array_inx": "0-1%999999999999"},
            "--array cannot be used by a Pollux job in this form: the number is above",
        ),
        (
            {"pn_min_tmp_disk": 4_000_000_000},
            "--tmp cannot be used by a Pollux job in this form: the number is above",
        ),
        (
            {"req_switch": 4_000_000_000},
            "--switches cannot be used by a Pollux job in this form: the number is above",
        ),
        ({"min_mem_per_node": 10**12}, "MB of memory per node: ask for less"),
        ({"cpus_per_tres": "gpu:99999999999999999999999"}, "CPUs per GPU"),
        ({"num_tasks": 4_000_000_000, "cpus_per_task": 60000}, "CPUs per GPU"),
        ({"tres_per_node": "gres:gpu:99999999999"}, "at most 65533 GPUs"),
        ({"tres_per_node": f"gres:gpu:{'a' * 65}:1"}, "a GPU type of 65 characters, at most 64 are allowed"),
        ({"begin_time": 10**15}, "--begin is 1000000000000000 s after 1970"),
    ],
)
def test_what_polluxd_could_not_read_is_refused(job: dict[str, object], complaint: str) -> None:
    assert complaint in refused(submit("#POLLUX", **job))


def test_an_admin_comment_has_at_most_2_kib() -> None:
    longest = {
        "features": "f" * 512,
        "req_nodes": "n" * 512,
        "exc_nodes": "n" * 512,
        "reservation": "r" * 400,
    }
    assert "at most 2048 are allowed: shorten" in refused(submit("#POLLUX gpu-types=" + "a" * 64, **longest))
    kept = submit("#POLLUX gpu-types=" + "a" * 64, **longest | {"reservation": "r" * 200})
    assert len(kept.admin_comment) <= 2048


def test_several_nodes_without_a_number_of_gpus_ask_for_one_of_each() -> None:
    """Slurm refuses a request per job for fewer GPUs than nodes."""
    several = submit("#POLLUX", tres_per_node=None, min_nodes=2, num_tasks=2, cpus_per_task=3)
    assert several.tres_per_job is None
    assert " cpus-per-gpu=3 " in several.admin_comment
    assert submit("#POLLUX", tres_per_node=None, min_nodes=1).tres_per_job == "gres:gpu:1"
