"""The only code that talks to Slurm: a protocol, clients, and a fake."""

from polluxd.slurm.protocol import ClusterState, Geometry, SlurmClient, SlurmJob

__all__ = ["ClusterState", "Geometry", "SlurmClient", "SlurmJob"]
