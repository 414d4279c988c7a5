"""The trace-driven simulator: the daemon's own policy, and its rivals, replayed against recorded arrivals.

    tables -> applications (how fast, how efficient) -> training (one job) -> engine (the cluster) -> measures

Nothing here needs Slurm, Postgres or a GPU.
"""
