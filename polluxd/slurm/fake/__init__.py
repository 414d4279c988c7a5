"""A Slurm in memory, for tests and for the simulator; contract tests hold it to the real one."""

from .fake_slurm import FakeSlurm
from .fake_slurmctld import CRED_EXPIRE_S

__all__ = ["CRED_EXPIRE_S", "FakeSlurm"]
