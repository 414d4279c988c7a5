"""Which of Slurm's input variables reach the commands that the agent and the launcher call."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from pollux.resize.companion_job import clean
from pollux.slurm_job.allocation import environment_of_srun
from pollux.slurm_job.slurm_commands import for_commands

PASSED = {
    "where Slurm is": "SLURM_CONF",
    "which job this is; the launcher gives sizes by options": "SLURM_JOB_ID SLURM_JOB_NAME SLURM_JOB_NUM_NODES",
    "the user's umask, as Slurm hands it from sbatch to srun": "SLURM_UMASK",
}
"""srun's input variables that pass, each with the reason."""
SET = {"SLURM_EXPORT_ENV SRUN_EXPORT_ENV": "--export=ALL", "SLURM_MPI_TYPE": "--mpi=none"} | {
    "SLURM_WAIT": "--wait=0",
    "SLURM_KILL_BAD_EXIT": "--kill-on-bad-exit=1",
    "SLURM_NNODES": "--nodes",
    "SLURM_NTASKS SLURM_NPROCS": "--ntasks",
    "SLURM_NTASKS_PER_NODE": "--ntasks-per-node=1",
    "SRUN_CPUS_PER_TASK SLURM_CPUS_PER_TASK": "--cpus-per-task",
}
"""Those that are dropped because the launcher gives the option itself."""
DROPPED = {
    "a size or a place of the submission or of a step around; the step takes the whole job": """
        SLURM_CORE_SPEC SLURM_CPUS_PER_GPU SLURM_CONSTRAINT SLURM_DISTRIBUTION SLURM_DIST_PLANESIZE SLURM_EXACT
        SLURM_EXCLUSIVE SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_GRES SLURM_GRES_FLAGS SLURM_HINT
        SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE SLURM_NTASKS_PER_CORE SLURM_NTASKS_PER_GPU
        SLURM_NTASKS_PER_SOCKET SLURM_NTASKS_PER_TRES SLURM_OVERCOMMIT SLURM_OVERLAP SLURM_SPREAD_JOB SLURM_STEP_GRES
        SLURM_THREADS SLURM_THREADS_PER_CORE SLURM_THREAD_SPEC SLURM_TRES_PER_TASK SLURM_USE_MIN_NODES
        SLURM_TASKS_PER_NODE SLURM_RESV_PORTS SLURM_REQ_SWITCH SLURM_WAIT_SWITCH SLURM_WAIT4SWITCH SLURM_NETWORK""",
    "binds the launcher, and with it all ranks of the node, to CPUs, memory or GPUs of a task": """
        SLURM_CPU_BIND SLURM_CPU_BIND_LIST SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_VERBOSE SLURM_GPU_BIND SLURM_MEM_BIND
        SLURM_MEM_BIND_LIST SLURM_MEM_BIND_TYPE SLURM_MEM_BIND_PREFER SLURM_MEM_BIND_SORT SLURM_MEM_BIND_VERBOSE
        SLURM_CPU_FREQ_REQ SLURM_GPU_FREQ""",
    "takes the ranks' output away from the job's log, or changes its form": """
        SLURM_STDOUTMODE SLURM_STDERRMODE SLURM_STDINMODE SLURM_OPEN_MODE SLURM_LABELIO SLURM_UNBUFFEREDIO SLURM_DEBUG
        SLURM_DEBUG_FLAGS SLURMD_DEBUG SLURM_SRUN_REDUCE_TASK_EXIT_MSG SRUN_DEBUG SRUN_OUTPUT SRUN_ERROR SRUN_INPUT""",
    "ends the step early, starts it elsewhere, or has another program run in it": """
        SLURM_TIMELIMIT SLURM_IMMEDIATE SLURM_NO_KILL SLURM_SIGNAL SLURM_EPILOG SLURM_PROLOG SLURM_TASK_EPILOG
        SLURM_TASK_PROLOG SLURM_TEST_EXEC SLURM_BCAST SLURM_BCAST_EXCLUDE SLURM_COMPRESS SLURM_SEND_LIBS
        SLURM_REMOTE_CWD SLURM_WORKING_DIR SRUN_CONTAINER SLURM_CONTAINER SLURM_DEPENDENCY SLURM_DELAY_BOOT
        SLURM_DISABLE_STATUS SLURM_CLUSTERS""",
    "changes srun's exit status, by which the launcher tells how the training ended": """
        SLURM_EXIT_ERROR SLURM_EXIT_IMMEDIATE SLURM_STEP_KILLED_MSG_NODE_ID""",
    "the account that pays; a step has no say": """
        SLURM_ACCOUNT SLURM_PARTITION SLURM_QOS SLURM_RESERVATION SLURM_WCKEY SLURM_ACCTG_FREQ SLURM_PROFILE
        SLURM_POWER SLURM_BURST_BUFFER""",
    "of MPI's launcher, which the ranks do not use": """
        PMI_FANOUT PMI_FANOUT_OFF_HOST PMI_TIME SLURM_PMI_KVS_NO_DUP_KEYS""",
}
"""Those that are dropped, each with the reason."""
OTHERS = {
    "how a time or a list is printed, which the agent reads": "SLURM_TIME_FORMAT SLURM_BITSTR_LEN SLURM_TOPO_LEN",
    "another cluster than the job's": "SLURM_CLUSTERS SBATCH_CLUSTERS",
    "read by no command that the agent calls": "SLURM_CONF_OUT",
    "messages among the answers": "SLURM_DEBUG_FLAGS SCANCEL_VERBOSE SBATCH_DEBUG",
    "jobs left out of an answer, or others in it": """SCONTROL_ALL SCONTROL_FEDERATION SCONTROL_FUTURE SCONTROL_LOCAL
        SCONTROL_SIBLING SQUEUE_ACCOUNT SQUEUE_ALL SQUEUE_ARRAY SQUEUE_FEDERATION SQUEUE_FORMAT SQUEUE_FORMAT2
        SQUEUE_LICENSES SQUEUE_LOCAL SQUEUE_NAMES SQUEUE_PARTITION SQUEUE_PRIORITY SQUEUE_QOS SQUEUE_SIBLING SQUEUE_SORT
        SQUEUE_STATES SQUEUE_USERS""",
    "jobs kept from scancel, or a question to nobody": """SCANCEL_ACCOUNT SCANCEL_BATCH SCANCEL_CTLD SCANCEL_FULL
        SCANCEL_HURRY SCANCEL_INTERACTIVE SCANCEL_NAME SCANCEL_PARTITION SCANCEL_QOS SCANCEL_STATE SCANCEL_USER
        SCANCEL_WCKEY""",
    "options of another submission; a companion has its own": """SBATCH_ACCOUNT SBATCH_ACCTG_FREQ SBATCH_ARRAY_INX
        SBATCH_BATCH SBATCH_CONSTRAINT SBATCH_CONTAINER SBATCH_CORE_SPEC SBATCH_CPUS_PER_GPU SBATCH_DELAY_BOOT
        SBATCH_DISTRIBUTION SBATCH_ERROR SBATCH_EXCLUSIVE SBATCH_EXPORT SBATCH_GET_USER_ENV SBATCH_GPU_BIND
        SBATCH_GPU_FREQ SBATCH_GPUS SBATCH_GPUS_PER_NODE SBATCH_GPUS_PER_TASK SBATCH_GRES SBATCH_GRES_FLAGS SBATCH_HINT
        SLURM_HINT SBATCH_IGNORE_PBS SBATCH_INPUT SBATCH_JOB_NAME SBATCH_MEM_BIND SBATCH_MEM_BIND_LIST
        SBATCH_MEM_BIND_PREFER SBATCH_MEM_BIND_TYPE SBATCH_MEM_BIND_VERBOSE SBATCH_MEM_PER_CPU SBATCH_MEM_PER_GPU
        SBATCH_MEM_PER_NODE SBATCH_NETWORK SBATCH_NO_KILL SBATCH_NO_REQUEUE SBATCH_OPEN_MODE SBATCH_OUTPUT
        SBATCH_OVERCOMMIT SBATCH_PARTITION SBATCH_POWER SBATCH_PROFILE SBATCH_QOS SBATCH_REQ_SWITCH SBATCH_REQUEUE
        SBATCH_RESERVATION SBATCH_SIGNAL SBATCH_SPREAD_JOB SBATCH_THREAD_SPEC SBATCH_THREADS_PER_CORE SBATCH_TIMELIMIT
        SBATCH_USE_MIN_NODES SBATCH_WAIT SBATCH_WAIT_ALL_NODES SBATCH_WAIT4SWITCH SBATCH_WCKEY SLURM_EXIT_ERROR
        SLURM_STEP_KILLED_MSG_NODE_ID SLURM_UMASK""",
}
"""The input variables of sbatch, scontrol, squeue and scancel: all are dropped, each for this reason."""
OWN = {"PATH": "/bin", "SEED": "3", "POLLUX_GATEWAY": "https://head:9851", "SLURMISH": "mine", "PMIX": "mine"}


def _names(table: dict[str, str]) -> set[str]:
    return {name for names in table.values() for name in names.split()}


def _told(command: str) -> set[str]:
    """Return the input variables that a command's man page names in its section ENVIRONMENT."""
    page = Path(f"/usr/share/man/man1/{command}.1.gz")
    if not page.is_file():
        pytest.skip(f"no man page of {command} here")
    text = re.sub(r"\\f[BIR]", "", gzip.decompress(page.read_bytes()).decode())
    sections = re.findall(r'(?ms)^\.SH "?([^"\n]*ENVIRONMENT VARIABLES)"?$(.*?)(?=^\.SH|\Z)', text)
    body = "".join(part for title, part in sections if not title.startswith("OUTPUT"))
    titles = re.findall(r"(?m)^\.TP.*\n(.*)$", body)
    return {name for title in titles for name in re.findall(r"\b[A-Z]+_[A-Z0-9_]+", title)}


def test_srun_gets_what_the_launcher_says_and_the_ranks_all_of_the_users() -> None:
    passed, gone = _names(PASSED), _names(DROPPED) | {name for names in SET for name in names.split()}
    assert not passed & gone
    found = environment_of_srun(OWN | dict.fromkeys(passed | gone, "1"))
    assert found.keys() == OWN.keys() | passed


def test_other_commands_get_where_slurm_is_and_nothing_else() -> None:
    told = dict.fromkeys(_names(OTHERS) | {"SLURM_JOB_ID", "SLURM_CONF"}, "1")
    assert for_commands(OWN | told).keys() == OWN.keys() | {"SLURM_CONF"}
    assert not clean(told).keys() & _names(OTHERS), "sbatch of a companion"


def test_the_table_has_every_variable_of_sruns_man_page() -> None:
    known = _names(PASSED) | _names(DROPPED) | {name for names in SET for name in names.split()}
    told = _told("srun")
    assert len(told) > 80
    assert not told - known


@pytest.mark.parametrize("command", ["sbatch", "scontrol", "squeue", "scancel"])
def test_the_table_has_every_variable_of_the_other_man_pages(command: str) -> None:
    told = _told(command)
    assert len(told) > 8
    assert not told - _names(OTHERS) - {"SLURM_CONF"}
