"""Fuzz tickets and companion files that are damaged or forged.

The agent reads such a file or refuses it with a warning. It never crashes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from pollux.slurm_job.ticket import Ticket, read_ticket

ENVIRONMENT = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_RESTART_COUNT": "1"}
GOOD = {
    "cluster": "main",
    "job_id": 7,
    "attempt": 1,
    "uid": 1000,
    "token": "t" * 64,
    "dsn": "host=db",
    "publish_interval_s": 30,
    "gpu_type": "a100",
    "later": {"2": "u" * 64},
}
JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def assert_sensible(ticket: Ticket | None) -> None:
    if ticket is not None:
        assert (ticket.job_id, ticket.attempt) == (7, 1)
        assert math.isfinite(ticket.publish_interval_s)
        assert ticket.publish_interval_s > 0
        assert ticket.gpu_type.isprintable()


def read(folder: Path, content: bytes) -> Ticket | None:
    path = folder / "7.n1.json"
    path.write_bytes(content)
    path.chmod(0o600)
    return read_ticket({**ENVIRONMENT, "POLLUX_TICKET_DIR": str(folder)})


@given(
    st.dictionaries(st.sampled_from(sorted(GOOD)), JSON_VALUES, max_size=4),
    st.sets(st.sampled_from(sorted(GOOD))),
)
def test_a_ticket_with_other_values_or_without_some(
    tmp_path: Path, other: dict[str, object], left_out: set[str]
) -> None:
    document = {key: value for key, value in {**GOOD, **other}.items() if key not in left_out}
    assert_sensible(read(tmp_path, json.dumps(document).encode()))


@given(
    st.one_of(
        st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))
    )
)
@example(b"[" * 60_000)
@example(b'{"job_id": ' + b"9" * 5000 + b"}")
@example(json.dumps({**GOOD, "later": []}).encode())
@example(json.dumps({**GOOD, "attempt": 0, "later": 3}).encode())
def test_a_ticket_of_any_bytes(tmp_path: Path, content: bytes) -> None:
    assert_sensible(read(tmp_path, content))
