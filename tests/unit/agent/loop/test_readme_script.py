"""The script in README.md trains as it stands there, and adapts its batch size."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[4] / "README.md").read_text()


@pytest.mark.slow
def test_the_script_of_the_readme_trains(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "POLLUX_CHECKPOINT_INTERVAL": "3600"},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]
    losses = [float(re.search(r"loss ([0-9.]+)", line)[1]) for line in lines]  # type: ignore[index]
    # The first epoch prints the size that it ends with, which on a slow machine has grown already.
    sizes = [int(size) for size in re.findall(r"pollux: batch size ([0-9]+) on 1 GPU", done.stderr)]
    rates = [float(rate) for rate in re.findall(r"learning rate ([0-9.]+)", done.stdout)]
    assert len(losses) == 10
    assert (sizes[0], re.search("lr=([0-9.]+)", script)[1]) == (8, "0.05")  # type: ignore[index]
    assert max(sizes) >= 16, "the batch size grows on one process"
    assert max(rates) > 1.5 * 0.05, "and the learning rate with it"
    assert "pollux: finished: " in done.stderr
    assert losses[-1] < 0.5 * losses[0]
