"""`make lint` holds the door to files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from contrib.checks import door

LAUNCHER = door.ROOT / "agent/pollux/launcher/launch.py"


@pytest.mark.parametrize(
    "line",
    [
        "open('/scratch/file')",
        "with open(path, 'w') as file: pass",
        "os.open(path, os.O_RDONLY)",
        "os.rename(a, b)",
        "os.replace(a, b)",
        "os.unlink(a)",
        "os.remove(a)",
        "os.link(a, b)",
        "os.symlink(a, b)",
        "os.mkdir(a)",
        "os.makedirs(a)",
        "os.truncate(a, 0)",
        "Path(a).write_text('x')",
        "(folder / name).write_bytes(b'')",
        "path.read_text()",
        "self.path.read_bytes()",
        "path.open()",
        "path.open('rb')",
        "path.unlink()",
        "path.rename(b)",
        "path.replace(b)",
        "path.mkdir()",
        "path.touch()",
        "shutil.rmtree(a)",
        "tempfile.mkdtemp()",
        "from shutil import copy",
        "from os import rename",
        "import shutil as sh",
        "import os as o",
        "builtins.open(a)",
        "Path.write_text(a, 'x')",
        "array.tofile(a)",
        "functools.partial(open, a)",
        "torch.save(state, 'model.pt')",
        "np.save(a, b)",
        "import numpy\nnumpy.load(a)",
        "import numpy as n\nn.savez_compressed(a, b)",
        "from torch import save",
        "import torch as t\nt.load(a)",
        "import logging.handlers as h\nh.RotatingFileHandler(a)",
        "logging.basicConfig(filename=a)",
        "figure.savefig(a)",
        "from zipfile import ZipFile",
        "tarfile.TarFile(a)",
        "gzip.GzipFile(a)",
        "io.FileIO(a)",
        "posix.open(a, 0)",
        "getattr(os, 'open')(a, 0)",
        "path.replace(target=b)",
        "write = path.write_text",
        "subprocess.run('echo > x', shell=True)",
        "os.system('rm x')",
        "exec('o' + 'pen(a)')",
    ],
)
def test_a_line_that_reaches_a_file_is_found(line: str) -> None:
    assert len(door.faults(line, "agent/pollux/planted.py")) == 1


@pytest.mark.parametrize(
    "line",
    [
        "open('/proc/self/stat')",
        "open(f'/proc/{pid}/stat')",
        "Path('/proc/self/cmdline').read_bytes()",
        "os.scandir('/proc')",
        "os.open(os.devnull, os.O_RDONLY)",
        "shutil.which('sbatch')",
        "text.replace('a', 'b')",
        "now.replace(hour=1)",
        "figure.savefig(drawn, dpi=120)",
        "from os import path, getpid",
        "import json as j\nj.load(file)",
        "with PrivateFolder(path) as folder, folder.read(name) as file: folder.rename(a, b)",
        "rendezvous = Rendezvous.open()",
    ],
)
def test_all_else_is_not(line: str) -> None:
    assert door.faults(line, "agent/pollux/planted.py") == []


def test_the_check_fails_for_an_open_that_is_planted_in_the_agent(tmp_path: Path) -> None:
    planted = tmp_path / "launch.py"
    planted.write_text(LAUNCHER.read_text() + "\nopen('/tmp/x', 'w')\n")
    done = subprocess.run(
        [sys.executable, door.__file__, str(planted)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "launch.py" in done.stdout


def test_the_programs_hold_it_and_each_exception_has_a_reason() -> None:
    assert door.main([]) == 0
    assert all(door.EXCEPTIONS.values())
