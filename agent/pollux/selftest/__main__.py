"""`python -m pollux.selftest`."""

import sys

from pollux.selftest.command import main

sys.exit(main())
