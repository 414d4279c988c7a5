"""The Slurm job around this process: environment, nodes, gateway."""
