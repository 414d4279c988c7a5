"""What goes wrong while bringing up the private cluster."""


class DevClusterError(RuntimeError):
    """The private cluster could not be started or driven: the message says which part and its log."""
