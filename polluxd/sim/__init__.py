"""The trace-driven simulator of the daemon's policy and its rivals.

    tables -> applications (how fast, how efficient) -> training (one job) -> engine (the cluster) -> measures

Nothing here needs Slurm, Postgres or a GPU.
"""
