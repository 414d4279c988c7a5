"""A plain script under torchrun adapts without a daemon.

It has two real ranks and notes its curves. SIGTERM, as Kubernetes sends it, loses none of its steps.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from pollux.errors import STOPPED_STATUS

EXAMPLES = 83

SCRIPT = f"""
import atexit, json, os, sys
from torch import distributed

def told():
    # gloo's threads could abort the process while the interpreter ends.
    print("groups left at exit: %s\\n" % distributed.is_initialized(), end="")  # in one write

atexit.register(told)  # runs after the agent's own functions
from every_sample import Training
from pollux.goodput import BatchChoice

os.environ["POLLUX_EXCHANGE_INTERVAL"] = "0"  # the ranks agree after every step, however fast it was
training = Training(checkpoint_dir=sys.argv[1], measuring={{"every": 1}})
job = training.job
assert job.adaptive and distributed.get_world_size() == 2
loader = job.loader(training.data({EXAMPLES}), 16, max_batch_size=64, per_gpu=(1, 16))
if job.is_main:
    job.training.advisor.close()  # its thread: here the test is the advisor
curves = []
job.optimizer.register_step_post_hook(lambda *_: curves.append(job.scalars()))

def propose(number, size):
    if job.is_main and number == 4:
        job.training.advisor.proposal = BatchChoice(16, 0)

training.run(loader, 4, propose)
job.close()
if job.is_main:
    print(json.dumps({{"ids": training.used.ids, "steps": job.progress.optimizer_steps, "curves": curves}}))
"""


ENDING = """
import os, sys, time
from pathlib import Path
import torch
import pollux

folder = Path(sys.argv[1])
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(60, 4), torch.arange(60))
network = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
job = pollux.attach(network, optimizer, adaptive=False, checkpoint_dir=folder / "checkpoints")
loader = job.loader(data, 6)
with (folder / f"used-{time.time_ns()}-{job.rank}").open("w", buffering=1) as used:
    for _ in job.epochs(3):
        for x, ids in loader:
            time.sleep(0.05)
            number, mine = loader.data.pass_index, ids.tolist() if loader.data.local_samples else []
            job.step(lambda: network.weight.sum() * 0 + job.model(x).square().mean())
            print(*(f"{number}.{i}" for i in mine), file=used)
job.close()
"""

TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
    *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
]


def environment() -> dict[str, str]:
    root = Path(__file__).parents[3]
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "POLLUX_"))}
    return {
        **plain,
        "PYTHONPATH": f"{root}/agent:{root}/tests/unit/agent",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def test_sigterm_to_torchrun_and_to_a_script_by_itself_loses_no_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ENDING)

    def lines() -> int:
        return sum(path.read_text().count("\n") for path in tmp_path.glob("used-*"))

    def ended_by_sigterm(command: list[str]) -> tuple[int, str]:
        begun, deadline = lines(), time.monotonic() + 100
        with (tmp_path / "out").open("w+") as out:
            process = subprocess.Popen(command, env=environment(), stdout=out, stderr=out)
            while lines() < begun + 4 and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            process.terminate()
            return process.wait(100), (tmp_path / "out").read_text()

    status, output = ended_by_sigterm([*TORCHRUN, str(script), str(tmp_path)])
    assert status != 0
    assert "SIGTERM: checkpoint of step" in output
    # As in a container whose first process is the script.
    status, output = ended_by_sigterm([sys.executable, str(script), str(tmp_path)])
    assert status == STOPPED_STATUS == 128 + signal.SIGTERM
    assert "SIGTERM: checkpoint of step" in output
    (steps,) = re.findall(r"checkpoint of step (\d+)", output)
    counts = Counter(sample for path in tmp_path.glob("used-*") for sample in path.read_text().split())
    assert set(counts.values()) == {1}
    assert len(counts) == 6 * int(steps), "each sample of each step up to the last checkpoint"


def test_a_plain_script_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [*TORCHRUN, str(script), str(tmp_path / "checkpoints")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said.count("groups left at exit: False") == 2
    (result,) = [json.loads(line) for line in said if line.startswith("{")]
    assert Counter(result["ids"]) == dict.fromkeys(range(EXAMPLES), 4)
    names = ("batch_size", "gain", "progress", "goodput", "lr_factor", "epoch")
    assert all(f"pollux/{name}" in row for row in result["curves"] for name in names)
    assert len(result["curves"]) == result["steps"]
    assert {row["pollux/batch_size"] for row in result["curves"]} >= {16.0, 32.0}
    progress = [row["pollux/progress"] for row in result["curves"]]
    assert progress == sorted(progress)
