"""What Slurm refused, why, and until when: no training is stopped twice for one cause."""
