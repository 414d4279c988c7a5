"""The Slurm job around this process: its environment, ticket, nodes and wake-up signal."""
