"""The whole on a machine with one GPU, or without: Slurm, Postgres, polluxd and three trainings (`make gpu-loop`)."""
