"""Real ranks, forked as in the unit tests of the agent: a library is imported once for all of them."""

from tests.unit.agent.conftest import ranks

__all__ = ["ranks"]
