"""A private Slurm and Postgres on one machine, for demo, tests and trials.

Every daemon listens on loopback, on a port chosen at start. All data is in one folder. The daemons are stopped by
process id. The cluster needs root (slurmd does) and the packages that `install.sh` installs. It neither uses nor
touches the system's own Slurm or Postgres.

    with DevCluster(directory) as cluster:
        subprocess.run(["sinfo"], env=os.environ | cluster.env)
"""

from .cluster import DevCluster
from .configuration import write_configuration
from .errors import DevClusterError
from .polluxd import Polluxd
from .postgres import DevPostgres
from .slurmconf import SiteLines

__all__ = ["DevCluster", "DevClusterError", "DevPostgres", "Polluxd", "SiteLines", "write_configuration"]
