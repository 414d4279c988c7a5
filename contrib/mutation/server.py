"""Run the unit tests of one mutant after another in one process."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "scipy.optimize",
    "sqlalchemy",
    "hypothesis",
    "pytest",
)


class Server:
    """Run tests in children of one process that has loaded torch and pytest.

    The tests run in a copy of the repository. `loaded` names the modules that the process loads once for all tests.
    """

    def __init__(self, loaded: Sequence[str] = LOADED) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pollux-mutation-"))
        self.marks, self.ran = self.folder / "marks", self.folder / "ran.json"
        command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
            if (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.folder / name)
        ours, theirs = os.pipe()
        asked, asks = os.pipe()
        self._process = os.fork()
        if not self._process:
            os.close(ours)
            os.close(asks)
            self._serve(asked, theirs, loaded)
        os.close(asked)
        os.close(theirs)
        self._answers, self._asks = os.fdopen(ours), os.fdopen(asks, "w", buffering=1)

    def run(
        self, sources: Mapping[str, bytes], tests: Sequence[str], limit: float, *, record: bool = False
    ) -> str:
        """Run tests against these sources of modules; return pytest's exit status.

        The answer is "timeout" if the tests take more than `limit` seconds. With `record`, `ran` has the marked
        statements of each test.
        """
        before = {module: (self.folder / module).read_bytes() for module in sources}
        for module, source in sources.items():
            (self.folder / module).write_bytes(source)
        self._asks.write(json.dumps([tests, limit, record]) + "\n")
        answer = self._answers.readline().strip()
        for module, source in before.items():
            (self.folder / module).write_bytes(source)
        return answer

    def output(self) -> str:
        """Return the last lines that the tests have printed."""
        return "\n".join((self.folder / "output").read_text(errors="replace").splitlines()[-30:])

    def close(self) -> None:
        # An end of file would not do: a server that was forked later holds this pipe as well.
        self._asks.write("\n")
        self._asks.close()
        os.waitpid(self._process, 0)
        shutil.rmtree(self.folder)

    def _serve(self, asked: int, theirs: int, loaded: Sequence[str]) -> None:
        os.chdir(self.folder)
        sys.dont_write_bytecode = True  # a mutant has its original's size, and may have its time
        sys.path[:] = [
            str(self.folder),
            str(self.folder / "agent"),
            *(p for p in sys.path if not p.startswith(str(ROOT)) or "site-packages" in p),
        ]
        for name in [
            name for name in list(sys.modules) if name.split(".")[0] in ("contrib", "polluxd", "pollux")
        ]:
            del sys.modules[name]
        for name in loaded:
            importlib.import_module(name)
        with os.fdopen(asked) as lines, os.fdopen(theirs, "w", buffering=1) as answers:
            while (line := lines.readline()).strip():
                answers.write(f"{self._one(*json.loads(line))}\n")
        os._exit(0)

    def _one(self, tests: list[str], limit: float, record: bool) -> str:
        child = os.fork()
        if not child:
            os.setsid()
            output = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1), os.dup2(output, 2)
            import pytest  # noqa: PLC0415 - loaded by the parent

            from contrib.mutation.marks import Recorder  # noqa: PLC0415 - of the copy

            options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
            plugins = [Recorder(self.marks, self.ran)] if record else []
            os._exit(pytest.main([*options, f"--timeout={limit:.0f}", *tests], plugins=plugins))
        deadline = time.monotonic() + limit
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "timeout"
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # processes that the tests have left behind
        return str(os.waitstatus_to_exitcode(ended[1]))
