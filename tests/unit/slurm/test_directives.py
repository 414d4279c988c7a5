"""AdminComment -> JobSpec."""

from __future__ import annotations

import pytest

from polluxd.errors import DirectiveError
from polluxd.model import JobSpec
from polluxd.slurm.directives import parse_admin_comment
from polluxd.slurm.protocol import Companion

NONCE = "0123456789abcdef" * 2


@pytest.mark.parametrize("text", ["", "(null)", "see the ticket", "not pollux:v1", "apollux:v1"])
def test_other_comments_are_not_ours(text: str) -> None:
    assert parse_admin_comment(text) is None


def test_defaults() -> None:
    read = parse_admin_comment("pollux:v1")
    assert read.spec == JobSpec()
    assert (read.submitted, read.begin) == (None, None)


def test_everything() -> None:
    read = parse_admin_comment(
        "pollux:v1 min-gpus=2 max-gpus=8 gpu-counts=2,4,8 adaptive=no preemptible=no "
        "cpus-per-gpu=3 mem-per-gpu=4000 submitted=17 begin=18"
    )
    assert read.spec == JobSpec(2, 8, False, False, 3, 4000, "2,4,8")
    assert (read.submitted, read.begin) == (17, 18)


def test_a_companion() -> None:
    read = parse_admin_comment(
        f"pollux:v1 companion-of=7 attempt=0 move=12 nonce={NONCE} cpus-per-gpu=2 mem-per-gpu=300 submitted=17"
    )
    assert read.companion == Companion(7, 0, 12, NONCE)
    assert (read.spec.cpus_per_gpu, read.spec.mem_per_gpu_mb, read.submitted) == (2, 300, 17)
    assert parse_admin_comment("pollux:v1 min-gpus=1").companion is None


def test_a_companion_from_before_nonces_has_an_empty_one() -> None:
    comment = "pollux:v1 companion-of=7 attempt=0 move=12 cpus-per-gpu=2 submitted=17"
    assert parse_admin_comment(comment).companion == Companion(7, 0, 12, "")


@pytest.mark.parametrize("name", ["-x", "a b", "x" * 65, "ä", "a/b"])
def test_a_search_is_a_name(name: str) -> None:
    assert parse_admin_comment("pollux:v1 search=lr_1").spec.search == "lr_1"
    with pytest.raises(DirectiveError):
        parse_admin_comment(f"pollux:v1 search={name}")


@pytest.mark.parametrize(
    "rule", ["any", "powers-of-two", "whole-nodes", "multiples-of-1", "multiples-of-64", "1", "1,2,4,8"]
)
def test_rules_on_gpu_counts(rule: str) -> None:
    assert parse_admin_comment(f"pollux:v1 gpu-counts={rule}").spec.gpu_counts == rule


@pytest.mark.parametrize(
    "rule",
    [
        *("", "some", "0", "1,,2", "1,", ",1", "1,0", "1.5", "-1", "\u0661", "powers-of-two,3"),
        *("multiples-of-", "multiples-of-0", "multiples-of-65", "multiples-of-08", "multiples-of-8,16"),
    ],
)
def test_rules_that_are_none(rule: str) -> None:
    with pytest.raises(
        DirectiveError, match="gpu-counts is any, powers-of-two, whole-nodes, multiples-of-8 "
    ):
        parse_admin_comment(f"pollux:v1 gpu-counts={rule}")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("pollux:v2 min-gpus=1", "'pollux:v2'"),
        ("pollux:v1 gpus=1", "'gpus=1'"),
        ("pollux:v1 min-gpus", "'min-gpus'"),
        ("pollux:v1 min-gpus=0", "min-gpus is a whole number from 1 up, not '0'"),
        ("pollux:v1 min-gpus=\u0663", "min-gpus is a whole number"),
        ("pollux:v1 adaptive=1", "adaptive is yes or no, not '1'"),
        ("pollux:v1 companion-of=7 attempt=0", "a companion has companion-of, attempt, move"),
        ("pollux:v1 " + "x" * 3000, "AdminComment has 3010 characters; at most 2048 are read"),
        ("pollux:v1 gpu-types=" + "a" * 65, "gpu-types is at most 16 types of at most 64 characters"),
        ("pollux:v1 gpu-types=" + ",".join(f"{i:064}" for i in range(8)), "512 in all"),
        ("pollux:v1 gpu-types=" + ",".join(map(str, range(17))), "at most 16 types"),
        ("pollux:v1 companion-of=0 attempt=0 move=1", "companion-of is a whole number"),
        ("pollux:v1 companion-of=7 attempt=-1 move=1", "attempt is a whole number"),
        (f"pollux:v1 companion-of={'9' * 1500} attempt=0 move=1", "companion-of is a whole number"),
        (f"pollux:v1 companion-of=7 attempt=0 move=1 nonce={NONCE[1:]}", "nonce is 32 hexadecimal digits"),
        (f"pollux:v1 companion-of=7 attempt=0 move=1 nonce={NONCE[1:]}G", "nonce is 32 hexadecimal digits"),
        ("pollux:v1 min-gpus=1 min-gpus=2", "twice"),
        ("pollux:v1 gpu-counts=any gpu-counts=any", "twice"),
        ("pollux:v1 constraint=a&", "constraint is features with & and"),
        ("pollux:v1 nodelist=n[1-", "nodelist is a node list"),
        ("pollux:v1 min-cpus=many", "min-cpus is a whole number"),
        ("pollux:v1 exclusive=no", "exclusive is yes, not 'no'"),
        ("pollux:v1 contiguous=no", "contiguous is yes"),
        ("pollux:v1 tmp=-1", "tmp is a whole number"),
        ("pollux:v1 asked=4", "asked is NODESxGPUS, not '4'"),
        ("pollux:v1 asked=0x4", "asked is NODESxGPUS"),
        ("pollux:v1 min-gpus=4 max-gpus=2", "min-gpus=4 is above max-gpus=2"),
    ],
)
def test_what_is_wrong_is_said(text: str, complaint: str) -> None:
    with pytest.raises(DirectiveError, match=complaint):
        parse_admin_comment(text)
