"""Write the page of refusals: tests/benchmarks/refusals.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

HEAD = """\
# Refusals

`make refusals` plays each row twice at the same time on real Slurm: beside polluxd, and without it. A row is a training
that runs, an act of polluxd, and a cause by which Slurm, the site or the job refuses that act. `scontrol show job` is
asked twice a second. `stopped`: for how long the training did not run after the cause was there, or made no step while
it ran (pauses up to 5 s aside); for `start`: from the submission to the first start. `stops`: restarts in that time of
attempts that had made a step. A cause that stops the training without polluxd too (its user requeues it) counts for
neither. A training to be shrunk has grown from 2 to 4 GPUs before, or its user asked for 4; another job of its user
then waits for 2.

| act | cause | Slurm | stopped [s] | without polluxd [s] | stops | GPUs at the end | without polluxd |
|---|---|---|---:|---:|---:|---:|---:|
"""


def page(rows: Sequence[dict[str, Any]], commit: str, wanted: Iterable[tuple[str, str]] = ()) -> str:
    """Return the page of these rows.

    Args:
        wanted: act and cause of all rows; the page names those without a result.
    """
    lines = [
        f"| {row['act']} | {row['cause']} | {row['slurm']} | "
        f"{row['stopped_s']:.1f} | {row['control_stopped_s']:.1f} | {row['stops']} | {row['final_gpus']} | "
        f"{row['control_final_gpus']} |"
        for row in sorted(rows, key=lambda row: row["act"])
        if not row["error"]
    ]
    # A training that gained GPUs, or gave them back, was refused nothing.
    acted = [
        row
        for row in rows
        if not row["control_stops"]
        and not row["error"]
        and (
            (row["act"] == "grow" and row["final_gpus"] <= row["control_final_gpus"])
            or (row["act"] == "shrink" and row["final_gpus"] >= 4)
        )
    ]
    still = sum(row["stopped_s"] == 0.0 for row in acted)
    longest = max((row["stopped_s"] for row in acted), default=0.0)
    most = max((row["stops"] for row in acted), default=0)
    late = max(
        (row["stopped_s"] - row["control_stopped_s"] for row in rows if row["act"] == "start"), default=0.0
    )
    end = (
        f"\nAt {commit}: {still} of {len(acted)} refused moves stopped the training for 0 s, none for more than "
        f"{longest:.1f} s, each at most {most} times. First starts came at most {late:.1f} s after those without "
        "polluxd.\n"
    )
    missing = sorted(set(wanted) - {(row["act"], row["cause"]) for row in rows if not row["error"]})
    if missing:
        end += f"\nWithout a result: {'; '.join(f'{act}: {cause}' for act, cause in missing)}.\n"
    return HEAD + "\n".join(lines) + "\n" + end
