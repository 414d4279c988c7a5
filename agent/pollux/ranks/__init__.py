"""The ranks of a job: their process groups, collectives and sharding."""
