"""How optimizers step: their families, and the second moments that their states hold."""

from pollux.optimizers.families import register

__all__ = ["register"]
