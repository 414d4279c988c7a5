"""`make demo` and `make compare`: see README.md, section "See it work"."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from contrib.devcluster import DevCluster, DevClusterError
from contrib.devcluster.interrupts import Interrupted, interruptible
from polluxd.errors import PolluxError

from .comparison import compare
from .run import RunFailedError, tail
from .scenes import Stage, demo
from .workload import WorkloadError, load

ROOT = Path(__file__).resolve().parents[2]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m contrib.demo", description=__doc__)
    parser.add_argument("--compare", action="store_true", help="under plain Slurm as well, in four ways")
    parser.add_argument("--runs", type=int, default=3, help="runs of each arm of --compare")
    parser.add_argument(
        "--workload", type=Path, help="[default: workload.toml, or compare.toml with --compare]"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "demo-out", help="where results go")
    parser.add_argument("--limit", type=float, help="seconds for a run, in place of the workload's limit_s")
    parser.add_argument("--keep", action="store_true", help="keep the scratch folder with all logs")
    return parser.parse_args()


def _report_failure(console: Console, error: RunFailedError, stage: Stage) -> None:
    """Print the error and the ends of the logs that may explain it."""
    console.print(f"\n[bold red]The demo failed:[/] {error}", soft_wrap=True, highlight=False)
    for path in stage.suspects(error.job):
        if path.exists():
            console.rule(f"end of {path.name}", align="left")
            console.print(tail(path), markup=False, highlight=False, soft_wrap=True)


def main() -> int:
    options = _arguments()
    # Wide enough for a sentence where output goes to a file or a pipe.
    console = Console(width=None if sys.stdout.isatty() else 160)
    here = Path(__file__).parent
    try:
        work = load(options.workload or here / ("compare.toml" if options.compare else "workload.toml"))
    except WorkloadError as error:
        console.print(f"demo: {error}", style="red")
        return 2
    if options.limit is not None:
        work = replace(work, limit_s=options.limit)
    scratch = Path(tempfile.mkdtemp(prefix="pollux-demo-"))
    scratch.chmod(0o755)  # Postgres and the jobs run as other users than root
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.out.mkdir(parents=True, exist_ok=True)
    stage = Stage(console=console, work=work, root=ROOT, scratch=scratch, out=options.out.resolve())
    status = 1
    try:
        with interruptible(), ExitStack() as stack:
            stack.callback(stage.keep_logs)
            console.print(f"Starting Slurm ({work.nodes} nodes, {work.gpus} GPUs) and Postgres in {scratch}")
            cluster = stack.enter_context(
                DevCluster(scratch / "cluster", nodes=work.nodes, gpus_per_node=work.gpus_per_node)
            )
            status = compare(stage, cluster, options.runs) if options.compare else demo(stage, cluster)
    except RunFailedError as error:
        _report_failure(console, error, stage)
    except (DevClusterError, PolluxError, OSError) as error:
        console.print(f"demo: {error}", style="red", soft_wrap=True, highlight=False)
    except Interrupted as stop:
        console.print(f"\n{stop.signal}: everything stopped", style="yellow")
        raise
    finally:
        if options.keep:
            console.print(f"kept {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
