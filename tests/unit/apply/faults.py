"""Faults that come with polluxd's death during a move.

test_matrix.py plays them on the cluster in memory, tests/integration/loop/test_real_faults.py on a real one.
"""

from __future__ import annotations

FAULTS = (
    "nothing",
    "database down",
    "scontrol times out",
    "applied but timed out",
    "slurmctld restarts",
    "second leader",
)
