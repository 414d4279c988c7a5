"""Check on this machine that trainings under Pollux work, and what the agent costs.

No polluxd and no Slurm take part. It uses the GPUs that this process may use (CUDA_VISIBLE_DEVICES), at most eight; in
a batch script, those of its first node. Without a GPU it runs on the CPU, over gloo. It takes under five minutes.

Exit status: 0 all checks passed, 1 a check failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pollux.private_folder import temporary_folder, write_named
from pollux.selftest.checks import CHECKS, Check, Result, carry_out
from pollux.selftest.machine import Machine, this_machine
from pollux.version import __version__

USERS = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
"""Whose CPU time counts: this process, and its children that have ended."""


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pollux selftest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[check.name for check in CHECKS],
        metavar="CHECK",
        help="these checks alone",
    )
    parser.add_argument(
        "--json", type=Path, default=Path("pollux-selftest.json"), metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there, as a page")
    return parser


def main(argv: Sequence[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    """Run the command; tests give other checks. Return its exit status."""
    options = argument_parser().parse_args(argv)
    import torch  # noqa: PLC0415 - `--help` needs none of it

    # In a process of its own: a process that has used CUDA cannot fork ranks that use it.
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        machine = pool.submit(this_machine, "cpu" if options.cpu else None).result()
    start, load = time.monotonic(), os.getloadavg()[0]
    print(
        f"{machine.name}; torch {torch.__version__}; {machine.ranks} ranks over {machine.backend}", flush=True
    )
    for note in machine.notes:
        print(note, flush=True)
    results = []
    with temporary_folder("pollux-selftest-") as folder:
        for number, check in enumerate(checks):
            if options.only is None or check.name in options.only:
                results.append(carry_out(check, machine, folder / str(number)))
                print(line_of(results[-1]), flush=True)
    failed = [result for result in results if result.outcome == "failed"]
    for result in failed:
        print(f"\n{result.check} failed: {result.trouble}\n  remedy: {result.remedy}")
    seconds = time.monotonic() - start
    document = {
        "device": machine.name,
        "backend": machine.backend,
        "ranks": machine.ranks,
        "notes": list(machine.notes),
        "pollux": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": machine.nccl,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(sum(sum(resource.getrusage(who)[:2]) for who in USERS), 1),
        "load": round(load, 1),
        "checks": [asdict(result) for result in results],
    }
    write_named(options.json, json.dumps(document, indent=2) + "\n")
    if options.markdown is not None:
        write_named(options.markdown, page_of(machine, document, results))
    passed = sum(result.outcome == "passed" for result in results)
    print(f"\n{passed} of {len(results)} checks passed in {seconds:.0f} s; {options.json}")
    return int(bool(failed))


def line_of(result: Result) -> str:
    return f"{result.check:<16} {result.outcome:<8} {result.seconds:5.1f} s  {figures_of(result)}"


def figures_of(result: Result) -> str:
    return "; ".join(f"{name} {value}" for name, value in result.figures.items())


def page_of(machine: Machine, document: dict[str, Any], results: Sequence[Result]) -> str:
    """Return the text of the committed page."""
    title = "The selftest on a GPU" if machine.gpus else "The selftest without a GPU"
    rows = "\n".join(f"| {r.check} | {r.outcome} | {r.seconds:.1f} | {figures_of(r)} |" for r in results)
    versions = (
        f"torch {document['torch']}, NCCL {document['nccl']}"
        if machine.gpus
        else f"torch {document['torch']}"
    )
    return (
        f"# {title}\n\n`make bench-gpu` runs `pollux selftest`: {machine.name}, {versions}, "
        f"{machine.ranks} ranks over {machine.backend}, {document['seconds']:.0f} s, "
        f"{document['cpu_seconds']:.0f} s of CPU time, load {document['load']} at the start.\n\n"
        + "".join(f"{note}\n\n" for note in machine.notes)
        + f"| check | outcome | seconds | figures |\n|---|---|---|---|\n{rows}\n"
    )
