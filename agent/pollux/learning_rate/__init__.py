"""Learning-rate rules, schedules and progress in scale-invariant steps."""
