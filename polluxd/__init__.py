"""polluxd: the cluster side of Pollux on Slurm."""
