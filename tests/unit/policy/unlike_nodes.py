"""Clusters whose nodes are not all alike, and jobs that were fitted there."""

from __future__ import annotations

import pytest

from tests.build import THETAS, node, report

THETA = THETAS["scalable"]._replace(alpha_rack=0.2, beta_rack=0.01)
QUICK = THETA._replace(alpha_grad=0.01, beta_grad=0.0004)


def cluster(kind, count=6):
    return [
        node(
            f"n{i}",
            gpu_type="ab"[i % 2] if "types" in kind else "",
            rack=f"r{i // 2}" if "racks" in kind else "",
        )
        for i in range(count)
    ]


def fitted(theta=THETA, **more):
    return report(theta, params_by_type={"b": QUICK}, **more)


KINDS = pytest.mark.parametrize("kind", ["plain", "types", "racks", "types and racks"])
