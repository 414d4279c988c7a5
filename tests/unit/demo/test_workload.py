"""The workload file, and the batch scripts that come of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from contrib.demo.workload import Size, WorkloadError, batch_script, load

TEXT = """
limit_s = 300
[cluster]
nodes = 2
gpus_per_node = 4
[[training]]
name = "one"
script = "train.py"
arrive_s = 0
epochs = 3
batch_size = 32
max_batch_size = 512
per_gpu = [8, 128]
lr = 0.1
alpha_s = 0.05
beta_s = 0.001
sync_local_s = 0.01
sync_node_s = 0.03
max_gpus = 4
"""


@pytest.fixture
def workload_file(tmp_path):
    path = tmp_path / "workload.toml"
    path.write_text(TEXT)
    return path


def test_a_pollux_job_asks_for_its_minimum_and_carries_its_directive(workload_file):
    (job,) = load(workload_file).trainings
    text = batch_script(job, root=Path("/src"), folder=Path("/run"))
    assert "#POLLUX min-gpus=1 max-gpus=4\n" in text
    assert "#SBATCH --gpus-per-node=1\n" in text
    assert "#SBATCH --nodes=1\n" in text
    assert "exec pollux run train.py" in text
    assert "--batch-size 32 " in text


def test_a_plain_job_is_the_same_but_for_its_size(workload_file):
    (job,) = load(workload_file).trainings
    text = batch_script(job, root=Path("/src"), folder=Path("/run"), size=Size(2, 4, 400, 4.5, 0.35))
    assert "POLLUX" not in text
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --gpus-per-node=4\n" in text
    assert "--batch-size 400 " in text
    assert "--epochs 4.5 " in text
    assert "--lr 0.35 " in text


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("lr = 0.1", "", "lr"),
        ("lr = 0.1", "lr = 0.1\nlearning = 2", "learning"),
        ("limit_s = 300", "", "limit_s"),
        ("[cluster]", "[cluster", "workload.toml"),
    ],
)
def test_a_faulty_workload_is_named(workload_file, old, new, told):
    workload_file.write_text(TEXT.replace(old, new))
    with pytest.raises(WorkloadError, match=told):
        load(workload_file)


def test_two_trainings_of_one_name_are_refused(workload_file):
    workload_file.write_text(TEXT + TEXT[TEXT.index("[[training]]") :])
    with pytest.raises(WorkloadError, match="share a name"):
        load(workload_file)


def test_the_demos_own_workload_is_sound():
    root = Path(__file__).parents[3]
    work = load(root / "contrib" / "demo" / "workload.toml")
    assert len(work.trainings) >= 3
    assert work.limit_s <= 360
    for job in work.trainings:
        assert (root / job.script).is_file()
        assert job.batch_size <= job.max_batch_size
