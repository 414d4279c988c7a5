"""Estimate a job's fits on GPU types where its training was not measured.

The estimates start from the fits on the measured types. Compute time scales with the configured speeds of the types;
synchronisation time stays the same. polluxd explores a type without a configured speed optimistically, as Sia does
(SOSP 2023): it assumes that the type is a little faster than the best measured type, so that the job tries the type
once. Measurements on the type then replace the assumption, for this run and later ones.

All functions here are pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from pollux.goodput import ThroughputParams
from polluxd.model import Node, Placement, Report

UNMEASURED = 1e-7
"""An alpha of synchronisation below this [s] sits at its bound: nothing was measured."""
OPTIMISM = 0.1
"""By how much faster than the best type measured an unknown one is taken to be, less with every move that a job has
made: more than the usual hysteresis once. What was measured before a move may be forgotten (no fingerprint, knowledge
refused by `prior=no`), and a job must not go to and fro for it."""


class GpuTypes:
    """The cluster's GPU types, and their relative speeds where configured."""

    def __init__(self, nodes: Iterable[Node], speeds: Mapping[str, float]) -> None:
        self._type = {n.name: n.gpu_type for n in nodes if n.gpus > 0}
        self._types = sorted(set(self._type.values()))
        self._speeds = speeds
        self.names = {part for kind in self._types for part in (kind, *kind.split("+"))}
        """The types, those within a node of several included."""

    def known_to(self, report: Report, placement: Placement, *, moves: int = 0) -> Report:
        """Return the report with a fit for each GPU type.

        A fit is measured, scaled by the configured speeds, or assumed optimistically. The report stays unchanged where
        all nodes have one type, where the report has no fit, or where neither the report nor the job's placement tells
        on which type the fit was measured.

        Args:
            moves: how many moves the job has made.
        """
        if len(self._types) < 2 or report.params is None or not _sound(report.params):
            return report
        own = self._own_type(report, placement)
        if own is None:
            return report
        measured = {
            kind: fit for kind, fit in report.params_by_type.items() if kind in self._types and _sound(fit)
        }
        measured[own] = report.params
        measured = {kind: _connected(fit, measured, own) for kind, fit in measured.items()}
        missing = [kind for kind in self._types if kind not in measured]
        hope = 1.0 + OPTIMISM / (1 + moves)
        guesses = {kind: _guess(kind, own, measured, self._speeds, hope) for kind in missing}
        return replace(
            report,
            gpu_type=own,
            params_by_type={**report.params_by_type, **measured, **guesses},
            assumed_types=frozenset(missing),
        )

    def _own_type(self, report: Report, placement: Placement) -> str | None:
        """The type that the report's fit was measured on, as Slurm names it."""
        if report.gpu_type and report.gpu_type in self._types:
            return report.gpu_type
        held = {self._type[name] for name in placement.nodes if name in self._type}
        return held.pop() if len(held) == 1 else None


def _connected(fit: ThroughputParams, measured: Mapping[str, ThroughputParams], own: str) -> ThroughputParams:
    """Return the fit with what other types tell of synchronisation.

    A fit to one GPU of a type puts it at zero. On that guess, a job measured on many GPUs of another type would leap to
    as many of this one.
    """
    others = [measured[own], *(measured[kind] for kind in sorted(measured))]
    if fit.alpha_local < UNMEASURED:
        source = next((o for o in others if o.alpha_local >= UNMEASURED), None)
        if source is not None:
            fit = fit._replace(alpha_local=source.alpha_local, beta_local=source.beta_local)
    source = max(others, key=lambda o: o.alpha_node)
    if fit.alpha_node < UNMEASURED <= source.alpha_node:
        fit = fit._replace(alpha_node=source.alpha_node, beta_node=source.beta_node)
    return fit


def _guess(
    kind: str,
    own: str,
    measured: Mapping[str, ThroughputParams],
    speeds: Mapping[str, float],
    hope: float,
) -> ThroughputParams:
    parts = kind.split("+")
    if len(parts) > 1:
        # A node of several types: nobody knows which GPUs the job would get, and its ranks wait for the slowest.
        fits = [measured.get(part) or _guess(part, own, measured, speeds, 1.0) for part in parts]
        return max(fits, key=lambda fit: fit.beta_grad)
    known = [own, *(k for k in sorted(measured) if k != own)]
    source = next((k for k in known if k in speeds), None)
    if kind in speeds and source is not None:
        return _faster(measured[source], speeds[kind] / speeds[source])
    best = min(known, key=lambda k: measured[k].beta_grad)
    return _faster(measured[best], hope)


def _faster(fit: ThroughputParams, factor: float) -> ThroughputParams:
    return fit._replace(alpha_grad=fit.alpha_grad / factor, beta_grad=fit.beta_grad / factor)


def _sound(fit: ThroughputParams) -> bool:
    return all(math.isfinite(x) and x >= 0 for x in fit if x is not None)
