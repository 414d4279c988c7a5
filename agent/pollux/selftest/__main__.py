"""`python -m pollux.selftest`."""

from pollux.selftest.checks import main

raise SystemExit(main())
