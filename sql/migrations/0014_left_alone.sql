-- Why polluxd leaves a job alone.

ALTER TABLE pollux.job ADD COLUMN left_alone text NOT NULL DEFAULT '';
COMMENT ON COLUMN pollux.job.left_alone IS 'why polluxd leaves the job to Slurm; empty: it does not';
