"""Read accounting limits as Slurm 22.05.8 prints them."""

from __future__ import annotations

import pytest

from polluxd.errors import SlurmGarbled
from polluxd.slurm.limits import GroupLimits, JobLimits, parse_limits
from polluxd.slurm.rules import parse_licenses, parse_partitions
from tests.unit.slurm.test_rules import PARTITION

HEAD = "Current Association Manager state\n\nAssociation Records\n\n"
ROOT = (
    "ClusterName=dev Account=root UserName= Partition= Priority=0 ID=1 SharesRaw/Norm/Level/Factor="
    "1/18446744073709551616.00/1/0.00 UsageRaw/Norm/Efctv=0.00/1.00/0.00 ParentAccount= Lft=1 DefAssoc=No "
    "GrpJobs=N(0) GrpJobsAccrue=N(0) GrpSubmitJobs=N(6) GrpWall=N(0.00) GrpTRES=cpu=N(0),mem=N(0),node=N(0),"
    "gres/gpu=N(0) GrpTRESMins=cpu=N(0),gres/gpu=N(0) GrpTRESRunMins=cpu=N(0),gres/gpu=N(0) MaxJobs= "
    "MaxJobsAccrue= MaxSubmitJobs= MaxWallPJ= MaxTRESPJ= MaxTRESPN= MaxTRESMinsPJ= MinPrioThresh=\n"
)
LAB = (
    ROOT.replace("Account=root", "Account=lab")
    .replace("ParentAccount=", "ParentAccount=root(1)")
    .replace("gres/gpu=N(0) GrpTRESMins=cpu=N(0)", "gres/gpu=6(4) GrpTRESMins=cpu=10(10)")
)
ALICE = (
    ROOT.replace("Account=root UserName=", "Account=lab UserName=alice(1000)")
    .replace("MaxJobs=", "MaxJobs=3(1)")
    .replace("MaxWallPJ= MaxTRESPJ=", "MaxWallPJ=50 MaxTRESPJ=cpu=3,gres/gpu=2,mem=4G")
)
BIG = (
    "\nQOS Records\n\nQOS=big(2) UsageRaw=0.000000 GrpJobs=7(1) GrpJobsAccrue=N(1) GrpSubmitJobs=N(2) GrpWall=N(0.00) "
    "GrpTRES=cpu=N(1),gres/gpu=N(2) GrpTRESMins=gres/gpu=1000(0) GrpTRESRunMins=gres/gpu=N(40) MaxWallPJ=100 "
    "MaxTRESPJ=gres/gpu=2 MaxTRESPN= MaxTRESMinsPJ= MinPrioThresh=  MinTRESPJ=gres/gpu=1 PreemptMode=OFF Priority=0 "
    "Account Limits= lab={MaxJobsPA=N(1) MaxJobsAccruePA=N(1) MaxSubmitJobsPA=N(2) MaxTRESPA=cpu=N(1),gres/gpu=5(2)} "
    "User Limits= 0={MaxJobsPU=2(1) MaxJobsAccruePU=N(1) MaxSubmitJobsPU=N(2) MaxTRESPU=cpu=N(1),gres/gpu=3(2)}\n"
)


def test_limits_of_associations() -> None:
    limits, senseless = parse_limits(HEAD + ROOT + LAB + ALICE)
    assert not senseless
    assert set(limits.associations) == {("root", None, ""), ("lab", None, ""), ("lab", 1000, "")}
    lab = limits.associations["lab", None, ""]
    assert lab.group == GroupLimits({"gres/gpu": 6}, None, ("GrpTRESMins=cpu=10",))
    assert lab.parent == "root"
    alice = limits.associations["lab", 1000, ""]
    assert (alice.jobs, alice.job) == (3, JobLimits({"cpu": 3, "gres/gpu": 2}, 3000.0))
    assert limits.associations["root", None, ""].group == GroupLimits()


def test_limits_of_a_qos() -> None:
    limits, senseless = parse_limits(HEAD + ROOT + BIG)
    assert not senseless
    big = limits.qos["big"]
    assert big.group == GroupLimits({}, 7, ())
    assert big.job == JobLimits({"gres/gpu": 2}, 6000.0, {"gres/gpu": 1})
    assert big.per_user == GroupLimits({"gres/gpu": 3}, 2)
    assert big.per_account == GroupLimits({"gres/gpu": 5}, None)


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
