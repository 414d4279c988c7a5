"""The command `pollux run`."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pollux.errors import LaunchError
from pollux.launcher import launch
from pollux.launcher.node import KEY_VARIABLE
from pollux.scheduler import credentials
from pollux.slurm_job.access import TOKEN

LAUNCHER = [sys.executable, "-m", "pollux.launcher.launch"]
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}


def command(*arguments: str, modules: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command. `modules`: a folder of modules that come before others of the same name."""
    if modules is not None:
        # The agent need not be installed: its folder may be in the tests' own PYTHONPATH.
        places = [str(modules), *filter(None, [os.environ.get("PYTHONPATH")])]
        env["PYTHONPATH"] = os.pathsep.join(places)
    return subprocess.run(
        [*LAUNCHER, *arguments], capture_output=True, text=True, env=PLAIN | env, check=False, timeout=100
    )


def script(folder: Path, text: str = "") -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def test_help_and_bad_input_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    shown = command("run", "--help", modules=tmp_path)
    assert shown.returncode == 0
    assert "MASTER_ADDR" in shown.stdout
    missing = command("run", "nowhere.py", modules=tmp_path)
    assert missing.returncode == 2
    assert "no such script: nowhere.py" in missing.stderr


def test_ranks_inherit_the_modules_that_preload_names(tmp_path: Path) -> None:
    (tmp_path / "slow_library.py").write_text(
        "import os\nPID = os.getpid()\nfrom lightning_utilities.core.rank_zero import rank_zero_only\n"
        "rank_zero_only.rank = 0\n"  # as Lightning does at its import, in the launcher here
    )
    training = script(
        tmp_path,
        "import os, sys\nloaded = 'slow_library' in sys.modules\nimport slow_library\n"
        "ranked = slow_library.rank_zero_only.rank == int(os.environ['RANK'])\n"
        "print(loaded and ranked, slow_library.PID == os.getppid())\n",
    )
    done = command("run", "--nproc", "2", "--preload", "slow_library", training, modules=tmp_path)
    assert (done.returncode, done.stdout.count("True True")) == (0, 2), done.stderr


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ("no_such_library", "--preload: no_such_library: No module named 'no_such_library'; mend this, or"),
        ("broken", "--preload: broken: no such file: lib.so; mend this, or leave broken out"),
        ("json", "--preload json: an import has opened the GPU, and ranks cannot inherit an open GPU"),
    ],
)
def test_a_preload_that_cannot_be_is_refused(tmp_path: Path, names: str, error: str) -> None:
    (tmp_path / "torch.py").write_text("class cuda:\n    _is_in_bad_fork = staticmethod(lambda: True)\n")
    (tmp_path / "broken.py").write_text("raise OSError('no such file: lib.so')\n")
    refused = command("run", "--preload", names, __file__, modules=tmp_path)
    assert refused.returncode == 2
    assert error in refused.stderr


ONCE = """
import importlib, sys
from pollux.launcher.node import PRELOAD
early = set(sys.modules)
for name in (name for name in PRELOAD if name.startswith("torch")):
    importlib.import_module(name)
of_torch = set(sys.modules)
import pollux.loop.session
print(*sorted((early | set(sys.modules) - of_torch) & set(sys.argv[1:])))
"""


def test_the_start_of_ranks_waits_for_nothing_but_torch_and_the_agent() -> None:
    # The first of these are imported by single ranks and in threads, once training goes on; the last by polluxd only.
    later = ["ssl", "http.client", "pollux.scheduler.publisher", "pollux.checkpoint.shard_files"]
    never = ["polluxd", "scipy", "sqlalchemy", "pydantic", "ClusterShell", "typer", "rich"]
    argv = [sys.executable, "-c", ONCE, *later, *never, "pollux.loop.session"]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=100)
    assert shown.stdout.split() == ["pollux.loop.session"]


SCRIPT = """
import os, sys, torch, torch.distributed as dist
assert __name__ == "__main__"
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} total {total.item():.0f} args {sys.argv[1:]} child-of-one {os.environ['LOCAL_RANK']}")
dist.destroy_process_group()
"""


def test_end_to_end_under_a_storm_of_usr1(tmp_path: Path) -> None:
    """`sbatch --signal=USR1@120` reaches the launcher, too."""
    process = subprocess.Popen(
        [*LAUNCHER, "run", "--nproc", "2", script(tmp_path, SCRIPT), "--lr", "1"],
        stdout=subprocess.PIPE,
        text=True,
        env=PLAIN | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    while not _blocks(process.pid, signal.SIGUSR1):
        assert process.poll() is None
        time.sleep(0.002)
    while process.poll() is None:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.002)
    text = process.stdout.read()
    assert process.returncode == 0, text
    assert "rank 0 total 3 args ['--lr', '1']" in text
    assert "rank 1 total 3" in text


KILLED = """
import multiprocessing.connection, os, signal, torch
from pathlib import Path
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset
import pollux
torch.manual_seed(0)
killed, model = Path(__file__).with_name("killed"), torch.nn.Linear(4, 1)
job = pollux.attach(model, torch.optim.SGD(model.parameters(), 0.01), adaptive=False)
for x, y in job.loader(TensorDataset(torch.randn(256, 4), torch.randn(256, 1)), 8, num_workers=2):
    job.step(lambda: mse_loss(job.model(x), y))
    if job.is_main and not killed.exists() and job.progress.optimizer_steps == 8:
        killed.touch()
        # While it takes a batch from a worker.
        multiprocessing.connection.answer_challenge = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_loader_of_a_killed_rank_prints_no_trace(tmp_path: Path) -> None:
    done = command("run", "--nproc", "2", script(tmp_path, KILLED), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "rank 0 (pid" in done.stderr
    assert "was ended by SIGKILL" in done.stderr
    assert "Traceback" not in done.stderr


def _blocks(pid: int, number: signal.Signals) -> bool:
    """Whether a process blocks a signal. proc(5)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (line.split()[1] for line in lines if line.startswith("SigBlk:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_the_environment_for_an_srun_of_the_script_has_the_sizes_of_now() -> None:
    stale = {
        "PATH": os.environ["PATH"],
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_CPUS_PER_NODE": "8(x2),6",
        "SLURM_NTASKS": "16",
        "SLURM_GPUS_PER_NODE": "4",
        "SLURM_MEM_PER_NODE": "1000",
        "MINE": "it's mine",
    }
    shell = f'eval "$({shlex.join([*LAUNCHER, "env"])})"; env'
    done = subprocess.run(
        ["sh", "-c", shell], env=stale, capture_output=True, text=True, check=True, timeout=60
    )
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert [found[name] for name in ("SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")] == ["2"] * 3
    one_task = found["SLURM_NTASKS_PER_NODE"], found["SRUN_CPUS_PER_TASK"]
    assert (*one_task, found["MINE"]) == ("1", "6", "it's mine")
    assert not found.keys() & {"SLURM_GPUS_PER_NODE", "SLURM_MEM_PER_NODE", TOKEN}
    assert done.stderr == ""


BatchScript = Callable[..., tuple[list[str], dict[str, str]]]


@pytest.fixture
def batch_script(monkeypatch: pytest.MonkeyPatch) -> BatchScript:
    """Call `pollux` in a batch script; return srun's command and environment."""
    started: list[Any] = []

    def step_status(command: list[str], env: dict[str, str]) -> int:
        started.append((command, env))
        return 0

    monkeypatch.setattr(launch, "step_status", step_status)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    for name, value in {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_CPUS_PER_NODE": "8(x2),6",
        "SLURM_NTASKS": "1",
        "SLURM_GPUS_PER_NODE": "1",
    }.items():
        monkeypatch.setenv(name, value)

    def call(*words: str) -> tuple[list[str], dict[str, str]]:
        assert launch.run(launch.argument_parser().parse_args(words)) == 0
        return started.pop()

    return call


def test_in_a_container_srun_starts_the_python_of_the_container(
    batch_script: BatchScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = ["apptainer", "exec", "my image.sif", "python3", "-m", "pollux.launcher.launch"]
    container = "apptainer exec 'my image.sif'"
    command, env = batch_script("run", "--container", container, "/in/the/image/train.py")
    assert command[command.index("apptainer") :][:6] == inside
    assert (env["POLLUX_CONTAINER"], env["POLLUX_BATCH_PYTHON"]) == (container, sys.executable)
    monkeypatch.setenv("POLLUX_CONTAINER", container)
    assert batch_script("run", "/in/the/image/train.py")[0] == command


def test_the_ranks_inherit_the_token_and_a_companions_do_not(
    batch_script: BatchScript,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    waits: list[float] = []

    def ask(_: Mapping[str, str], *, patience_s: float) -> tuple[dict[str, str], str]:
        waits.append(patience_s)
        return {TOKEN: "granted"}, ""

    monkeypatch.setattr(credentials, "environment_of_ranks", ask)
    training = script(tmp_path)
    command, env = batch_script("run", training)
    assert env[TOKEN] == "granted"
    assert not any("granted" in word for word in command)
    assert batch_script("run", "--container", "apptainer exec i.sif", training)[1][TOKEN] == "granted"
    assert waits == [0.0, credentials.CONTAINER_PATIENCE_S], "nobody in a container can ask later"
    invitation = tmp_path / "companion-1.json"
    facts = {"address": "127.0.0.1", "port": 1, "cwd": str(tmp_path), "argv": [training], "secret": "s"}
    invitation.write_text(json.dumps(facts))
    invitation.chmod(0o600)
    monkeypatch.chdir(tmp_path)
    assert TOKEN not in batch_script("run", "--companion", str(invitation))[1]
    monkeypatch.setattr(credentials, "environment_of_ranks", lambda *_, **__: ({}, "connection refused"))
    assert TOKEN not in batch_script("run", training)[1]
    assert "connection refused" in capsys.readouterr().err


@pytest.mark.parametrize("job", ["", "7"])
def test_a_container_is_for_batch_scripts(monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_STEP_ID", "0")
    with pytest.raises(LaunchError, match="in a batch script"):
        launch.run(launch.argument_parser().parse_args(["run", "--container", "a", __file__]))


def test_a_container_that_is_no_command_is_refused(
    monkeypatch: pytest.MonkeyPatch, batch_script: BatchScript
) -> None:
    monkeypatch.setenv("POLLUX_CONTAINER", "apptainer 'exec")
    with pytest.raises(LaunchError, match=r"expected a command as container, got .*No closing quotation"):
        launch.run(launch.argument_parser().parse_args(["run", __file__]))


def test_from_a_batch_script_srun_gets_the_sizes_of_now(batch_script: BatchScript, tmp_path: Path) -> None:
    training = script(tmp_path)
    command, env = batch_script("run", training, "--epochs", "3")
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpus-per-task=6"} <= set(command)
    assert command[-3:] == [training, "--epochs", "3"]
    preloading, _ = batch_script("run", "--preload", "json, csv", training)
    assert preloading[-3:] == ["--preload", "json,csv", training]
    assert len(env[KEY_VARIABLE]) == 64, "the launchers know each other by it"
    assert not any(env[KEY_VARIABLE] in word for word in command), "nobody else reads it"
    assert TOKEN not in env, "a plain job has none"
    assert "SLURM_NTASKS" not in env
    assert "SLURM_GPUS_PER_NODE" not in env


def test_the_skill_is_printed_whole_and_is_short(capfdbinary):
    with pytest.raises(SystemExit) as ended:
        launch.main(["skill"])
    text = capfdbinary.readouterr().out.decode()
    assert ended.value.code == 0
    assert text == (Path(launch.__file__).parents[1] / "SKILL.md").read_text()
    assert len(text.splitlines()) <= 200
