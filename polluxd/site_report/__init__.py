"""What a cluster's GPU hours went to, from Slurm's accounting alone.

It reads files, and is pure beside that: no Slurm, no database, no daemon. `job_log` and `machine` read, `gpu_hours`
divides all GPU hours by cause, `waits` and `right_sizes` look at jobs, `replay` asks what another policy would do, and
`document` puts it together.
"""
