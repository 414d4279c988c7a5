"""A job's fits on GPU types where its training was never measured, from where it was. Pure.

Computing takes so much longer or shorter as the configured speeds of the types say; synchronising takes as long. A
type without a speed is explored optimistically, as in Sia (SOSP 2023): it is taken to be a little faster than the best
that was measured, so that it is tried once. What is measured there then counts instead, for this run and later ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from pollux.goodput import ThroughputParams
from polluxd.model import Node, Placement, Report

OPTIMISM = 1.1
"""How much faster than the best type measured an unknown one is taken to be: more than the usual hysteresis."""


def with_types(
    report: Report, placement: Placement, nodes: Mapping[str, Node], speeds: Mapping[str, float]
) -> Report:
    """The report with a fit for each GPU type of the cluster: measured, scaled by `speeds`, or taken optimistically.

    As it is where all nodes are of one type, nothing is fitted, or the type that the fit was measured on is not known
    (neither from the report nor from what the job holds).
    """
    types = sorted({n.gpu_type for n in nodes.values() if n.gpus > 0})
    own = _own_type(report, placement, nodes, types)
    if len(types) < 2 or own is None or report.params is None or not _sound(report.params):
        return report
    measured = {kind: fit for kind, fit in report.params_by_type.items() if kind in types and _sound(fit)}
    measured[own] = report.params
    missing = [kind for kind in types if kind not in measured]
    guesses = {kind: _guess(kind, own, measured, speeds) for kind in missing}
    return replace(
        report,
        gpu_type=own,
        params_by_type={**report.params_by_type, **measured, **guesses},
        assumed_types=frozenset(missing),
    )


def _own_type(
    report: Report, placement: Placement, nodes: Mapping[str, Node], types: Collection[str]
) -> str | None:
    """The type that the report's fit was measured on, as Slurm names it."""
    if report.gpu_type and report.gpu_type in types:
        return report.gpu_type
    held = {nodes[name].gpu_type for name in placement.nodes if name in nodes}
    return held.pop() if len(held) == 1 else None


def _guess(
    kind: str, own: str, measured: Mapping[str, ThroughputParams], speeds: Mapping[str, float]
) -> ThroughputParams:
    known = [own, *(k for k in sorted(measured) if k != own)]
    source = next((k for k in known if k in speeds), None)
    if kind in speeds and source is not None:
        return _faster(measured[source], speeds[kind] / speeds[source])
    best = min(known, key=lambda k: measured[k].beta_grad)
    return _faster(measured[best], OPTIMISM)


def _faster(fit: ThroughputParams, factor: float) -> ThroughputParams:
    return fit._replace(alpha_grad=fit.alpha_grad / factor, beta_grad=fit.beta_grad / factor)


def _sound(fit: ThroughputParams) -> bool:
    return all(math.isfinite(x) and x >= 0 for x in fit if x is not None)
