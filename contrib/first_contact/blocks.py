"""The blocks of README.md and docs/start.md, in a fresh virtual environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from contrib.devcluster import DevCluster

from .users import ADA, as_user, home_of

SIZE, RATE = re.compile(r"batch size (\d+)"), re.compile(r"learning rate ([0-9.]+)")


class Environment:
    """A virtual environment with the agent, as the page says to make it, and scikit-learn."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self.bin = folder / "bin"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [self.bin / "pip", "install", "--quiet", "-c", root / "constraints.txt"]
        # torch's wheels with CUDA are gigabytes: constraints.txt names the one of this project's own environment.
        subprocess.run([*pip, f"{root}/agent[torch]", "scikit-learn"], check=True, cwd=root)

    def run(self, folder: Path, *words: str | Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
        """Run Python, or torchrun with several ranks; output and errors in one."""
        folder.mkdir(parents=True, exist_ok=True)
        launch = [self.bin / "python"] if ranks == 1 else [self.bin / "torchrun", f"--nproc_per_node={ranks}"]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("POLLUX", "SLURM", "PYTHON"))}
        return subprocess.run(
            [*launch, *words], cwd=folder, env={**env, "OMP_NUM_THREADS": "1"}, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900,  # a minute on a quiet machine
        )  # fmt: skip


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def readme_script(root: Path) -> str:
    (script,) = _blocks(root / "README.md", "python")
    return script


def start_script(root: Path) -> str:
    """The start page's lines, after what they take for granted: model, data, loss and a scheduler."""
    (lines,) = _blocks(root / "docs" / "start.md", "python")
    before = readme_script(root).partition("job = pollux.attach")[0]
    return (
        f"{before}scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10**6)\n"
        f"loss_fn = torch.nn.functional.cross_entropy\n{lines}    print('batch size', job.batch_size)\n"
    )


def _row(block: str, done: subprocess.CompletedProcess[str], first: int, began: float) -> dict[str, Any]:
    """Judge a script's output: the batch size doubled, and so did the learning rate where the script prints it."""
    sizes, rates = ([float(n) for n in each.findall(done.stdout)] for each in (SIZE, RATE))
    ok = (
        done.returncode == 0 and bool(sizes) and max(sizes) >= 2 * first and "pollux: finished" in done.stdout
    )
    detail = f"batch size {first} to {max(sizes, default=0):.0f}"
    if block.startswith("README"):
        ok = ok and max(rates) > 1.5 * rates[0]
        detail += f", learning rate {rates[0]:g} to {max(rates):g}" if rates else ""
    detail += f", {time.monotonic() - began:.0f} s"
    return {"block": block, "detail": detail if ok else done.stdout[-600:], "ok": ok}


def block_rows(fresh: Environment, folder: Path) -> list[dict[str, Any]]:
    """Run the Python blocks under python and torchrun."""
    folder.mkdir(parents=True)
    scripts = {"README.md": (readme_script(fresh.root), 8), "docs/start.md": (start_script(fresh.root), 8)}
    rows = []
    for page, (script, first) in scripts.items():
        for ranks in (1, 2):
            place = folder / f"{Path(page).stem}-{ranks}"
            place.mkdir()
            (place / "train.py").write_text(script)
            words, began = "python" if ranks == 1 else "torchrun, 2 ranks", time.monotonic()
            rows.append(_row(f"{page}, {words}", fresh.run(place, "train.py", ranks=ranks), first, began))
    return rows


def tutorial_row(fresh: Environment, folder: Path) -> dict[str, Any]:
    """Run the commands of docs/tutorial.md in the shell that it names, with their sleeps."""
    page = fresh.root / "docs" / "tutorial.md"
    (script,) = _blocks(page, "bash")
    typed = re.findall(r"^\$ (.*)", "\n".join(_blocks(page, "console")), re.MULTILINE)
    place = str(folder / "tutorial")
    lines = [line.replace("/tmp/tutorial", place) for line in typed if line != "make shell"]
    # The page's first look comes when the job has grown, however busy the machine is.
    grown = "for n in $(seq 300); do grep -q 'resized in place' first.log && break; sleep 1; done"
    lines = [line.replace("sleep 40; squeue", f"{grown}; squeue") for line in lines]
    lines.insert(1, f"cat >first.sh <<'END'\n{script}END")
    commands = folder / "tutorial.sh"
    commands.write_text("#!/bin/bash\nset -e\n" + "\n".join(lines) + "\n")
    commands.chmod(0o755)
    words = ["-m", "contrib.devcluster", "shell", "--polluxd", "--directory", f"{place}-cluster"]
    done = subprocess.run(
        [sys.executable, *words], env={**os.environ, "SHELL": str(commands)},
        cwd=fresh.root, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    expected = ("resized in place", "What other sizes would bring", "second", "grows from")
    ok = done.returncode == 0 and all(each in done.stdout for each in expected)
    detail = "all commands" if ok else (done.stdout + done.stderr)[-900:]
    return {"block": "docs/tutorial.md", "detail": detail, "ok": ok}


def submit_block(fresh: Environment, cluster: DevCluster, folder: Path, page: str) -> dict[str, Any]:
    """Submit the page's batch script with README's training, as an ordinary user."""
    (script,) = _blocks(fresh.root / page, "bash")
    home, block = home_of(ADA, folder), f"{page}, batch script"
    (home / "train.py").write_text(readme_script(fresh.root))
    (home / "train.sh").write_text(script)
    path, log = f"{fresh.bin}:{cluster.env['PATH']}", home / f"{Path(page).stem}.log"
    made = as_user(ADA, ["sbatch", "--parsable", f"--output={log}", "train.sh"], cluster, folder, PATH=path)
    if made.returncode:
        return {"block": block, "detail": made.stderr.strip(), "ok": False}
    job, began = made.stdout.strip(), time.monotonic()
    state = ""
    while time.monotonic() < began + 480 and not re.search("COMPLETED|FAILED|CANCELLED", state):
        time.sleep(2)
        state = cluster.command("scontrol", "show", "job", job).partition("JobState=")[2].split()[0]
    text = log.read_text(errors="replace") if log.exists() else ""
    done = subprocess.CompletedProcess(["sbatch"], 0 if state == "COMPLETED" else 1, f"{state}\n{text}")
    return _row(block, done, 8, began)
