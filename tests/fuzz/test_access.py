"""Fuzz the token in a job's environment, which its user may have written.

The agent uses it or ignores it. It never crashes.
"""

from __future__ import annotations

import json
import math

from hypothesis import example, given
from hypothesis import strategies as st

from pollux.slurm_job.access import TOKEN, GatewayAccess, read_access
from tests.fuzz.json_values import json_values

ENVIRONMENT = {
    "POLLUX_GATEWAY": "https://head.example.org:9851",
    "POLLUX_SUBMITTED": "1795338957",
    "SLURM_JOB_ID": "7",
    "SLURM_RESTART_COUNT": "1",
}
GOOD = {"token": "J.7.1." + "t" * 43, "publish_interval_s": 30, "gpu_type": "a100"}


def assert_sensible(access: GatewayAccess | None) -> None:
    assert access is not None
    assert (access.job_id, access.attempt) == (7, 1)
    if access.grant is not None:
        assert access.grant.token.startswith("J.7.1.")
        assert access.grant.token.isascii()
        assert "\n" not in access.grant.token
        assert math.isfinite(access.grant.publish_interval_s)
        assert access.grant.publish_interval_s > 0
        assert access.grant.gpu_type.isprintable()


def test_the_example_is_a_token() -> None:
    access = read_access({**ENVIRONMENT, TOKEN: json.dumps(GOOD)})
    assert access is not None
    assert access.grant is not None


@given(
    st.dictionaries(st.sampled_from(sorted(GOOD)), json_values, max_size=3),
    st.sets(st.sampled_from(sorted(GOOD))),
)
def test_a_token_with_other_values_or_without_some(other: dict[str, object], left_out: set[str]) -> None:
    document = {key: value for key, value in {**GOOD, **other}.items() if key not in left_out}
    assert_sensible(read_access({**ENVIRONMENT, TOKEN: json.dumps(document)}))


@given(st.text(max_size=200))
@example("[" * 60_000)
@example('{"token": ' + "9" * 5000 + "}")
@example(json.dumps({**GOOD, "token": "J.7.1." + "t" * 43 + "\n"}))
@example(json.dumps({**GOOD, "publish_interval_s": 10**400}))
def test_a_token_of_any_text(content: str) -> None:
    assert_sensible(read_access({**ENVIRONMENT, TOKEN: content}))
