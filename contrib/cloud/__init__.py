"""Trials of rented nodes on a private Slurm with power saving."""
