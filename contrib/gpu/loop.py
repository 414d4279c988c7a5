"""The trainings of workload.toml under polluxd, on a cluster whose GPUs are all the one that the machine has."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from contrib.demo.live import LiveView
from contrib.demo.pollux_side import Database, Polluxd
from contrib.demo.run import Run, RunFailedError, tail
from contrib.demo.scenes import LAST_REPORT_S
from contrib.demo.summary import Summary
from contrib.demo.workload import load
from contrib.devcluster import DevCluster, SiteLines

ROOT = Path(__file__).resolve().parents[2]
ONE_GPU = """\
#!/bin/bash
# Slurm counts stand-ins: as many GPUs as it gave to the step are all the first one of the machine.
[ -z "$CUDA_VISIBLE_DEVICES" ] || echo "export CUDA_VISIBLE_DEVICES=$(sed 's/[^,]\\+/0/g' <<<"$CUDA_VISIBLE_DEVICES")"
"""
"""A TaskProlog."""
CGROUPS = {"cgroup.conf": "CgroupPlugin=cgroup/v1\n"}
"""Under run.sh, whose folders of cgroups are empty ones: slurmd does not recognise them by itself."""


def run(scratch: Path, console: Console, sharing: Mapping[str, str]) -> dict[str, Any]:
    """Run the workload; return its figures.

    Args:
        sharing: what lets several ranks use one GPU, by variable.

    Raises:
        RunFailedError: a training failed, or something did not happen that the run is to show.
    """
    work = load(Path(__file__).with_name("workload.toml"))
    prolog, folder = scratch / "one_gpu", scratch / "jobs"
    prolog.write_text(ONE_GPU)
    prolog.chmod(0o755)
    folder.mkdir(mode=0o755)
    memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (1 << 20) // work.nodes
    cluster = DevCluster(
        scratch / "cluster",
        nodes=work.nodes,
        gpus_per_node=work.gpus_per_node,
        memory_mb=memory_mb,
        site=SiteLines(
            lines=(f"TaskProlog={prolog}",), files=CGROUPS if "POLLUX_GPU_RUN" in os.environ else {}
        ),
    )
    begun = time.monotonic()
    with cluster:
        up_s = time.monotonic() - begun
        daemon, database = Polluxd(cluster, folder), Database(cluster)
        under = Run(work, env={**cluster.client_environment, **sharing}, root=ROOT, folder=folder)
        try:
            daemon.start()
            with LiveView(console, "On one GPU", work.gpus, database.details, database.reasons) as show:
                recording = under(show, daemon.must_run)
            time.sleep(LAST_REPORT_S)
            batches, moves = database.batch_sizes(), database.moves()
        except RunFailedError as error:
            log = under.log_of(error.job) if error.job else daemon.log
            raise RunFailedError(f"{error}\n{tail(log, 40)}", error.job) from None
        finally:
            database.close()
            daemon.stop()
    results = under.results()
    summary = Summary(
        recording, work.gpus, {name: float(str(r["accuracy"])) for name, r in results.items()}, batches, moves
    )
    document = {"cluster_up_s": round(up_s, 1), **summary.document(), "results": results}
    if faults := [*summary.faults(), *missing(document)]:
        moves_made = [
            f"{move['job_id']} {move['path']} {move['from']} to {move['to']}" for move in document["moves"]
        ]
        raise RunFailedError("; ".join([*faults, "the moves were:", *moves_made]))
    return document


def gpus_of(placement: str) -> int:
    """Return the GPUs of a placement such as `n1:2,n2:2`; 0 of `none`."""
    return sum(int(part.rpartition(":")[2]) for part in placement.split(",") if ":" in part)


def kind(move: Mapping[str, Any]) -> str:
    before, after = gpus_of(move["from"]), gpus_of(move["to"])
    way = "grown" if after > before else "shrunk" if after < before else "moved"
    return f"{way}, {'in place' if move['path'] == 'resize' else 'through the queue'}"


WANTED = ("grown", "shrunk", "in place", "through the queue")


def missing(document: Mapping[str, Any]) -> list[str]:
    """List what the run was to show and did not."""
    seen = " ".join(kind(move) for move in document["moves"])
    lacking = [f"no training was moved so: {wanted}" for wanted in WANTED if wanted not in seen]
    sharded = document["results"].get("sharded", {})
    if sharded.get("kill_pause_s") is None:
        lacking.append("no rank was killed")
    if sharded.get("optimizer_steps") != sharded.get("wanted_steps"):
        lacking.append(f"`sharded` made other steps than it was to make: {json.dumps(sharded)}")
    return lacking
