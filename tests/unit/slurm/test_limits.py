"""Read accounting limits as Slurm 22.05.8 prints them."""

from __future__ import annotations

import pytest

from polluxd.errors import SlurmGarbled
from polluxd.slurm.limits import GroupLimits, JobLimits, parse_limits
from polluxd.slurm.rarely_asked import RarelyAsked
from polluxd.slurm.rules import parse_licenses, parse_partitions
from tests.unit.slurm.scontrol_output import ALICE, BIG, HEAD, LAB, PARTITION, ROOT


def test_limits_of_associations() -> None:
    limits, senseless = parse_limits(HEAD + ROOT + LAB + ALICE)
    assert not senseless
    assert set(limits.associations) == {("root", None, ""), ("lab", None, ""), ("lab", 1000, "")}
    lab = limits.associations["lab", None, ""]
    assert lab.group == GroupLimits({"gres/gpu": 6}, None, ("GrpTRESMins=cpu=10",))
    assert lab.parent == "root"
    alice = limits.associations["lab", 1000, ""]
    assert (alice.jobs, alice.job) == (3, JobLimits({"cpu": 3, "gres/gpu": 2, "mem": 4096}, 3000.0))
    assert limits.associations["root", None, ""].group == GroupLimits()


def test_limits_of_a_qos() -> None:
    limits, senseless = parse_limits(HEAD + ROOT + BIG)
    assert not senseless
    big = limits.qos["big"]
    assert big.group == GroupLimits({}, 7, ())
    assert big.job == JobLimits({"gres/gpu": 2}, 6000.0, {"gres/gpu": 1})
    assert big.per_user == GroupLimits({"gres/gpu": 3}, 2)
    assert big.per_account == GroupLimits({"gres/gpu": 5}, None)
    each, _ = parse_limits(HEAD + ROOT + BIG.replace("MaxTRESPN=", "MaxTRESPN=gres/gpu=2,cpu=8"))
    assert each.qos["big"].job.per_node == {"gres/gpu": 2, "cpu": 8}


def test_a_name_cannot_pass_for_a_limit() -> None:
    name = "lab GrpJobs=0(0) GrpTRES=gres/gpu=0(0)"
    limits, senseless = parse_limits(HEAD + LAB.replace("Account=lab", f"Account={name}"))
    assert not senseless
    assert limits.associations[name, None, ""].group.tres == {"gres/gpu": 6}


def test_a_record_that_makes_no_sense_is_named_and_limits_nothing() -> None:
    limits, senseless = parse_limits(HEAD + ROOT + LAB.replace("GrpJobs=N(0)", "GrpJobs=some") + ALICE)
    assert set(limits.associations) == {("root", None, ""), ("lab", 1000, "")}
    assert list(senseless) == ["limits, line 6"]


@pytest.mark.parametrize("text", ["", "slurm_load_assoc_mgr_info error: x\n", (HEAD + ROOT)[:-1]])
def test_what_is_no_answer_is_garbled(text: str) -> None:
    with pytest.raises(SlurmGarbled):
        parse_limits(text)


def test_what_a_partition_admits() -> None:
    text = (
        PARTITION.replace("AllowAccounts=ALL", "AllowAccounts=lab,vision")
        .replace("AllowQos=ALL", "DenyQos=low")
        .replace("MaxNodes=UNLIMITED", "MaxNodes=2")
        .replace("MaxTime=UNLIMITED", "MaxTime=1-00:00:00")
        .replace("QoS=N/A", "QoS=cap")
    )
    main = parse_partitions(text)[0]["main"]
    assert (main.max_nodes, main.max_time_s, main.qos) == (2, 86400.0, "cap")
    assert main.refuses("lab", "normal", 86400.0) == ""
    assert main.refuses("other", "normal", 60.0) == "AllowAccounts of partition main"
    assert main.refuses("lab", "low", 60.0) == "DenyQos of partition main"
    assert main.refuses("lab", "normal", 86401.0) == "MaxTime of partition main"


def test_free_licenses() -> None:
    text = "LicenseName=matlab Total=4 Used=1 Free=3 Reserved=2 Remote=no\n"
    assert parse_licenses(text) == {"matlab": 1}
    assert parse_licenses("No licenses configured in Slurm.\n") == {}
    with pytest.raises(SlurmGarbled):
        parse_licenses(text.replace("Free=3", "Free=many"))


def test_limits_are_read_before_their_time_where_a_training_is_to_be_stopped() -> None:
    told, now = [HEAD + ROOT], 1000.0

    def run(*command: str) -> str:
        return told[-1] if "assoc_mgr" in command else "AccountingStorageEnforce = associations,limits\n"

    asked = RarelyAsked(run, lambda: now)
    before = asked.limits()
    told.append((HEAD + ROOT).replace("GrpJobs=N(", "GrpJobs=7("))
    assert asked.limits() == before
    asked.ask_limits()
    (one,) = asked.limits()[0].associations.values()
    assert one.group.jobs == 7
    told.append("slurm_load_assoc_mgr_info error: x\n")
    asked.ask_limits()
    assert asked.limits()[0].associations[one.account, None, ""] == one, "the last answer stands"


def test_what_slurm_counts_of_running_minutes() -> None:
    text = HEAD + ROOT.replace("GrpTRESRunMins=cpu=N(0)", "GrpTRESRunMins=cpu=300(240)")
    group = parse_limits(text)[0].associations["root", None, ""].group
    assert (group.running_minutes, group.counted_minutes) == ({"GrpTRESRunMins=cpu": 300}, {"cpu": 240})


def test_past_use_leaves_less_to_running_jobs_where_slurm_is_safe() -> None:
    text = HEAD + ROOT + LAB.replace("GrpTRESMins=cpu=10(10)", "GrpTRESMins=cpu=10(4)")
    assert parse_limits(text)[0].associations["lab", None, ""].group.running_minutes == {}
    lab = parse_limits(text, safe=True)[0].associations["lab", None, ""].group
    assert lab.running_minutes == {"GrpTRESMins=cpu": 6}
