"""The command lines `polluxd` and `polluxctl`.

Their matrices are small: a second thread of the linear algebra only costs time. OMP_NUM_THREADS overrides this.
"""

import os

# Read once, when numpy and scipy are loaded: before any module of this package loads them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
# pydantic would look through the metadata of every installed package for plugins; polluxd has none.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
