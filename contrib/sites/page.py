"""Write the page of drawn sites: tests/benchmarks/sites.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEAD = """\
# Drawn sites

A seed draws a site: slurm.conf, accounts, jobs with their options, and acts of administrators. `make sites SEED=11-40`
plays each site twice at the same time on a real Slurm: beside polluxd, and without it. A play fails where a job is lost
beside polluxd, waits more than 25 s longer without a reason that polluxd states, or where polluxd's own watch speaks.
squeue and scontrol measure, once a second. A replay replaces the row of its seed and version. `make sites` plays seeds
1 to 10 after its other cases. `SUITE=trixie contrib/devcluster/newer.sh sites --seeds 1-3` plays on another Debian's
Slurm.

Failed plays found, and it is mended: a job whose first start had failed stayed bound to that start's nodes, which
showed when polluxd was killed (seed 19); short jobs counted as failed moves; a license that is free again closed starts
for up to half an hour; a lost start waited 30 s; the second user of a shared checkpoint folder could write none. The
watch spoke of a job whose limit had just been lifted, while the same plan gave the GPUs to another one (seed 29).
At seed 37, Slurm 22.05 itself loses count of typed GPUs when slurmctld restarts: jobs wait for good, with and without
polluxd.

Idle GPU-seconds count while a job that could use the GPUs waits. A longer wait can be right: other jobs had the GPUs.

| seed | Slurm | result | idle GPU-s beside polluxd | without | longest extra wait [s] | commit |
|---:|---|---|---:|---:|---:|---|
"""
COLUMNS = HEAD.splitlines()[-2].count("|") - 1
Key = tuple[str, int]
"""Slurm's version and the seed."""


def with_row(text: str, row: Mapping[str, Any], commit: str) -> str:
    """Return the page with the row of one play, which replaces an older one of the same seed and version."""
    rows = read_rows(text)
    measured = ("idle_gpu_s_beside_waiting", "idle_gpu_s_in_control", "longest_extra_wait_s")
    result = "ok" if row["result"] == "ok" else f"failed: {row['what_the_user_saw']}".replace("|", "/")
    rows[row["slurm"], row["seed"]] = (result, *(f"{row.get(name, 0.0):.0f}" for name in measured), commit)
    lines = [f"| {seed} | {slurm} | {' | '.join(rows[slurm, seed])} |" for slurm, seed in sorted(rows)]
    beside, without = (sum(float(cells[column]) for cells in rows.values()) for column in (1, 2))
    good = sum(cells[0] == "ok" for cells in rows.values())
    end = f"\n{good} of {len(rows)} plays are ok. In all, {beside:,.0f} GPU-seconds were idle beside waiting jobs with "
    return HEAD + "\n".join(lines) + f"\n{end}polluxd, {without:,.0f} without it.\n"


def read_rows(text: str) -> dict[Key, tuple[str, ...]]:
    """Read result, measurements and commit of each play."""
    found = {}
    for line in text.splitlines():
        cells = tuple(cell.strip() for cell in line.split("|")[1:-1])
        if len(cells) == COLUMNS and cells[0].isdigit():
            found[cells[1], int(cells[0])] = cells[2:]
    return found
