"""Which GPU types a domain tells apart."""

from __future__ import annotations

import pytest

from polluxd.policy.domains import Domain, gpu_types
from tests.build import THETAS, job, node, report

QUICK = THETAS["scalable"]._replace(alpha_grad=0.005)
LOGIN = node("login", 0, gpu_type="none")
A100, T4, H100 = (node(name, gpus, gpu_type=name) for name, gpus in (("a100", 4), ("t4", 1), ("h100", 4)))


def types(*members, fits):
    return gpu_types(Domain(members, (job(1), job(2, report=report(params_by_type=fits)))))


@pytest.mark.parametrize(
    ("members", "fits", "told_apart"),
    [
        ((A100, T4, LOGIN), {"a100": QUICK}, ("a100", "t4")),
        ((T4, H100, A100), {"a100": QUICK}, ("a100", "h100", "t4")),
        ((A100, T4), {}, ()),
        ((A100, T4), {"h100": QUICK}, ()),
        ((A100, T4), {"a100": QUICK, "t4": QUICK}, ()),
        ((A100, LOGIN), {"a100": QUICK}, ()),
    ],
)
def test_types_are_told_apart_where_a_job_was_measured_differently_on_them(members, fits, told_apart):
    assert types(*members, fits=fits) == told_apart
