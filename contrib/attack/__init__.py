"""Attack a real Slurm and Postgres as ordinary users.

Each attack is shown to succeed with its defence switched off.
"""
