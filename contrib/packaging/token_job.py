"""A job of the installation tests: ask the gateway for the job's token, as an agent does, and say how it went."""

from __future__ import annotations

import os
import time

from pollux.scheduler.credentials import environment_of_ranks

found, reason = environment_of_ranks(os.environ, patience_s=60.0)
print("the gateway gave a token" if found else f"no token: {reason or 'this is no Pollux job'}", flush=True)
time.sleep(600)
