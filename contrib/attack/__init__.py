"""Attack a real Slurm and Postgres as ordinary users.

Each attack was once seen to succeed, at the commit that it names.
"""
