-- What administrators order of single jobs: pins, and moves taken back; and when a draining attempt would have ended.

ALTER TABLE pollux.job ADD COLUMN pinned_by text;
COMMENT ON COLUMN pollux.job.pinned_by IS 'who pinned it (polluxctl pin): its GPUs stay as they are';

ALTER TABLE pollux.move ADD COLUMN cancelled_by text;
COMMENT ON COLUMN pollux.move.cancelled_by IS 'who took it back; obeyed until the job is requeued';

ALTER TABLE pollux.move ADD COLUMN ends_at timestamptz;
COMMENT ON COLUMN pollux.move.ends_at IS 'when Slurm would have ended the attempt that drains, by its time limit';

-- The restart budget counts the drains of the last hour.
CREATE INDEX move_drained ON pollux.move (cluster, ((times ->> 'draining')::double precision))
    WHERE times ? 'draining';
