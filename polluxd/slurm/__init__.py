"""The only code that talks to Slurm: one protocol, its clients, and a fake for tests."""

from polluxd.slurm.protocol import ClusterState, Geometry, SlurmClient, SlurmJob

__all__ = ["ClusterState", "Geometry", "SlurmClient", "SlurmJob"]
