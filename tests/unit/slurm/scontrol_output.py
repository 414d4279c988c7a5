"""What `scontrol show` prints on real clusters."""

from __future__ import annotations

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
NODE = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=8 CPUTot=8 CPULoad=0.18 AvailableFeatures=(null) "
    "ActiveFeatures=(null) Gres=gpu:4 GresDrain=N/A GresUsed=gpu:0 NodeAddr=127.0.0.1 NodeHostName=vm Port=15221 "
    "Version=22.05.8 OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=4000 AllocMem=0 FreeMem=23183 Sockets=8 "
    "Boards=1 State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=main,debug  "
    "BootTime=1795270341 SlurmdStartTime=1795271829 CfgTRES=cpu=8,mem=4000M,billing=8 AllocTRES= CapWatts=n/a "
    "Reason=bad fan Gres=gpu:9 State=IDLE [root@1795270341]\n"
)
NODE_26_05 = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=2 CPUEfctv=8 CPUTot=8 CPULoad=5.47 AvailableFeatures=(null) "
    "ActiveFeatures=(null) Gres=gpu:a100:4 GresDrain=N/A GresUsed=gpu:a100:2 NodeAddr=127.0.0.1 "
    "NodeHostName=vm Port=22350 Version=26.05.5 OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=4000 AllocMem=0 "
    "FreeMem=19351 Sockets=8 Boards=1 State=MIXED+PLANNED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A "
    "Partitions=main,pollux  BootTime=1795270340 SlurmdStartTime=1795271829 LastBusyTime=1795271829 "
    "ResumeAfterTime=None SuspendTime=INFINITE CfgTRES=cpu=8,mem=4000M,billing=8 AllocTRES=cpu=2 CurrentWatts=0\n"
)
PARTITION = (
    "PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A "
    "DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED "
    "MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=n[1-4] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO "
    "OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=32 TotalNodes=4 SelectTypeParameters=NONE "
    "JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=32,mem=16000M,node=4,billing=32\n"
)
RESERVATION = (
    "ReservationName=root_1 StartTime=1795330000 EndTime=1795333600 Duration=01:00:00 Nodes=n[1-4] NodeCnt=4 "
    "CoreCnt=32 Features=(null) PartitionName=(null) Flags=MAINT,IGNORE_JOBS,SPEC_NODES,ALL_NODES TRES=cpu=32 "
    "Users=root Groups=(null) Accounts=(null) Licenses=(null) State=INACTIVE BurstBuffer=(null) Watts=n/a "
    "MaxStartDelay=(null)\n"
)
