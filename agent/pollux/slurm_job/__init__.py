"""The Slurm job around this process: environment, ticket, nodes."""
