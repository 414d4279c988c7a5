"""The version of this release: agent and polluxd have the same."""

__version__ = "0.1.0"
