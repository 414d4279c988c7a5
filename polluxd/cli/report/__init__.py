"""`polluxctl report`: one self-contained page on a period."""

from .command import report

__all__ = ["report"]
