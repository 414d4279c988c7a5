"""The only code that talks to Slurm: a protocol, clients, and a fake."""
