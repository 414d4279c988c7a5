"""What polluxd tells Prometheus: declared once, counted where it happens.

No label holds a text that a user chose: values of labels are words of polluxd's own.
"""

from .declared import CLUSTER_GAUGES, Metrics, timed_slurm

__all__ = ["CLUSTER_GAUGES", "Metrics", "timed_slurm"]
