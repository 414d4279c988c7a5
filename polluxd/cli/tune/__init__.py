"""`polluxctl tune`: searches over hyper-parameters."""

from polluxd.cli.tune.command import app

__all__ = ["app"]
