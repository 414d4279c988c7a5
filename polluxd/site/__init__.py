"""What an administrator installs in Slurm, and the checks of it."""
