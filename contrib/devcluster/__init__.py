"""A private Slurm and Postgres on one machine, for the demo, the tests and for people who want to try things.

Everything listens on loopback, on ports chosen at start, keeps its data in one folder and is stopped by
process id. Needs root (slurmd does) and the packages that `install.sh` installs; nothing of the system's own
Slurm or Postgres is used or touched.

    with DevCluster(directory) as cluster:
        subprocess.run(["sinfo"], env=os.environ | cluster.env)
"""

from .cluster import DevCluster
from .configuration import write_configuration
from .errors import DevClusterError
from .postgres import DevPostgres

__all__ = ["DevCluster", "DevClusterError", "DevPostgres", "write_configuration"]
