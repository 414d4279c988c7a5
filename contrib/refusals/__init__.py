"""What Slurm, the site or a job can refuse, tried on a running training, beside the same cluster without polluxd."""
