"""Real ranks, forked as in the unit tests of the agent: a library is imported once for all of them.

JAX keeps what it has compiled for all ranks of all tests.
"""

import os
import tempfile

from tests.unit.agent.conftest import each_attach_is_of_a_new_process, ranks
from tests.unit.agent.launched_step import PRELOADED, PROCESSES

__all__ = ["each_attach_is_of_a_new_process", "ranks"]

PROCESSES.set_forkserver_preload([*PRELOADED, "transformers.trainer", "lightning"])

_COMPILED = tempfile.TemporaryDirectory(prefix="pollux-test-jax-")
os.environ |= {
    "JAX_COMPILATION_CACHE_DIR": _COMPILED.name,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
