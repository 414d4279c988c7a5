"""The training loop: `attach`, the job, its steps and its report."""
