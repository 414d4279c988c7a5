"""The state of one training: its models, its step under way, its bounds. No Slurm, no scheduler, no file format."""
