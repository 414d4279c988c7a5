"""`pollux selftest`: whether trainings under Pollux work on this machine, and what they cost."""
