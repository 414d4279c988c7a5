"""What the launcher reads from Slurm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pollux.errors import LaunchError
from pollux.launcher.meeting import candidate_ports
from pollux.launcher.node import KEY_VARIABLE, launch_key
from pollux.slurm_job.allocation import (
    environment_of_srun,
    expand_indices,
    fewest_cpus,
    first_host,
    gpu_type_of,
    in_batch_script,
    machine_gpus,
    munge_socket,
    node_address,
    nodes_now,
    read_allocation,
    show_job,
    task_of,
    visible_gpus,
)

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_RESTART_COUNT": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[3-4]",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "n4",
    "CUDA_VISIBLE_DEVICES": "0,1,2",
    # Stale, of the submission:
    "SLURM_NTASKS": "8",
    "SLURM_GPUS": "16",
    "SLURM_NNODES": "4",
}


def test_the_allocation_is_what_slurm_wrote_for_this_start() -> None:
    found = read_allocation(STEP)
    assert (found.node_rank, found.num_nodes, found.workers) == (1, 2, 3)
    assert (found.first_node, found.attempt, found.gpu_ids) == ("n3", 3, ("0", "1", "2"))
    assert read_allocation(STEP, workers=1).workers == 1


def test_ports_are_derived_alike_and_from_the_secret() -> None:
    """A stranger who knows job, attempt and step cannot take the ports first."""
    secret = "s" * 64
    keys = []
    for node, said in (("1", secret), ("0", secret), ("0", "t" * 64)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(KEY_VARIABLE, said)
            keys.append(launch_key(read_allocation(STEP | {"SLURM_NODEID": node}), None))
    one, other, foreign = map(candidate_ports, keys)
    assert one == other
    assert len(set(one)) == 16
    assert all(1024 < port < 32768 for port in one)
    assert not set(one) & set(foreign)


@pytest.mark.parametrize(
    "change",
    [{"SLURM_LOCALID": "1"}, {"SLURM_STEP_NUM_TASKS": "8"}, {"SLURM_NODEID": "x"}, {"SLURM_JOB_ID": ""}],
)
def test_a_step_that_cannot_be_ours_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match=r"expected"):
        read_allocation(STEP | change)


def test_stale_sizes_do_not_reach_srun() -> None:
    cleaned = environment_of_srun(
        STEP | {"SLURM_CPUS_PER_TASK": "2", "RANK": "1", "PATH": "/bin", "SLURM_CONF": "/c"}
    )
    assert not {"SLURM_NTASKS", "SLURM_GPUS", "SLURM_NNODES", "SLURM_CPUS_PER_TASK", "RANK"} & set(cleaned)
    assert {"PATH", "SLURM_CONF", "SLURM_JOB_ID"} <= set(cleaned)


def test_batch_script_and_task_are_told_apart() -> None:
    assert in_batch_script({"SLURM_JOB_ID": "7"})
    assert not in_batch_script(STEP)
    assert not in_batch_script({})


@pytest.mark.parametrize(
    ("env", "gpus"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_STEP_GPUS": "6,7"}, ("2", "3")),
        ({"CUDA_VISIBLE_DEVICES": "0,0"}, ("0", "0")),  # two ranks share a GPU, as in `make gpu-loop`
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ()),
        ({"SLURM_STEP_GPUS": "4-6"}, ("0", "1", "2")),
        ({"SLURM_JOB_GPUS": "0,2"}, ("0", "1")),
        ({"SLURM_GPUS_ON_NODE": "2"}, ("0", "1")),
        ({}, ()),
    ],
)
def test_gpus_of_this_node(env: dict[str, str], gpus: tuple[str, ...]) -> None:
    assert visible_gpus(env) == gpus


def test_outside_of_slurm_the_machines_gpus_are_counted(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert machine_gpus(tmp_path) == ("0", "1")


def test_slurm_lists() -> None:
    assert expand_indices("0-2,5") == [0, 1, 2, 5]
    with pytest.raises(LaunchError, match="GPU indices"):
        expand_indices("a-b")
    assert first_host("gpu[03-05,9],login") == "gpu03"
    assert first_host("n1,n2") == "n1"
    assert first_host("rack[1-2]node[4-5]") == "rack1node4"
    assert first_host("") == ""
    assert fewest_cpus("8(x2),4") == 4
    assert fewest_cpus("16") == 16
    assert fewest_cpus("") == 0


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have a shell script answer in scontrol's place."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    def answers(script: str) -> None:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "scontrol").chmod(0o755)

    return answers


def test_the_node_address_comes_from_slurm(scontrol: Callable[[str], None]) -> None:
    scontrol('echo "NodeName=$5 Arch=x NodeAddr=10.1.2.3 NodeHostName=x"')
    assert node_address("n1") == "10.1.2.3"
    scontrol("exit 1")
    assert node_address("n1") == "n1"


def test_after_a_shrink_slurm_is_asked_for_the_number_of_nodes(
    scontrol: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol('echo "$*" >> "$0.asked"\necho "JobId=7 NodeList=n[1-2] NumNodes=2 NumCPUs=8"')
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "4",
        "POLLUX_GATEWAY": "https://head:9851",
        "POLLUX_SUBMITTED": "1",
    }
    assert nodes_now(job) == 2
    assert (tmp_path / "scontrol.asked").read_text() == "show job -o 7\n"
    # Neither of these can have shrunk.
    assert nodes_now(job | {"SLURM_JOB_NUM_NODES": "1"}) == 1
    assert nodes_now(job | {"POLLUX_GATEWAY": ""}) == 4
    assert len((tmp_path / "scontrol.asked").read_text().splitlines()) == 1
    scontrol("printf 'JobId=7 JobName=caf\\351 NumNodes=2\\n'")
    assert nodes_now(job) == 2
    for answer in ("exit 1", "echo garbled", "echo JobId=7 NumNodes=0", "echo JobId=7 NumNodes=9"):
        scontrol(answer)
        assert nodes_now(job) == 4
    (tmp_path / "scontrol").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nodes_now(job) == 4


def test_slurm_names_the_socket_of_munge_and_the_type_of_a_nodes_gpus(
    scontrol: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(text: str) -> None:
        scontrol(f"cat <<'END'\n{text}\nEND")

    answers(
        "AccountingStorageTRES   = cpu\nAuthInfo                = socket=/run/m/socket,ttl=60\nAuthType = auth/munge"
    )
    assert munge_socket() == Path("/run/m/socket")
    answers("AuthInfo                = (null)")
    assert munge_socket() is None
    for gres, kind in {
        "gpu:a100:4(S:0-1)": "a100",
        "gpu:4": "",
        "(null)": "",
        "gpu:a100:2,gpu:t4:2": "",
        "gpu:a100:2,gpu:a100:2,nic:1": "a100",
    }.items():
        answers(f"NodeName=n1 CPUTot=8 Gres={gres} GresUsed=gpu:h100:1 State=IDLE")
        assert gpu_type_of("n1") == kind
    (tmp_path / "scontrol").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (munge_socket(), gpu_type_of("n1")) == (None, "")


def test_the_last_task_of_an_array_is_not_taken_for_its_first(scontrol: Callable[[str], None]) -> None:
    """Slurm shows all tasks under the array's id, which the last task has, too."""
    first = "JobId=8 ArrayJobId=7 ArrayTaskId=0 EndTime=2001-01-01T00:00:00"
    scontrol(f"echo '{first}'\necho 'JobId=7 ArrayJobId=7 EndTime=Unknown '")
    assert show_job("7") == "JobId=7 ArrayJobId=7 EndTime=Unknown"
    assert show_job("9") is None


def test_a_task_has_one_name_in_all_its_attempts() -> None:
    task = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    assert (task_of(task), task_of({"SLURM_JOB_ID": "7"}), task_of({})) == ("7_3", "7", "")
