"""The error of the private cluster."""


class DevClusterError(RuntimeError):
    """The private cluster could not be started or driven.

    The message names the part that failed and its log.
    """
