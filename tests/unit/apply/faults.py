"""What goes wrong beside polluxd's death during a move: on the cluster in memory (test_matrix.py), and on a
real one (tests/integration/loop/test_real_faults.py)."""

from __future__ import annotations

FAULTS = (
    "nothing",
    "database down",
    "scontrol times out",
    "applied but timed out",
    "slurmctld restarts",
    "second leader",
)
