-- The batch that fits into the memory of each GPU type.

ALTER TABLE pollux.report_history ADD COLUMN local_max_by_type jsonb NOT NULL DEFAULT '{}';
COMMENT ON COLUMN pollux.report_history.local_max_by_type IS
    'most examples per pass on GPU types where one has run out of memory; "": on others';
CREATE OR REPLACE VIEW pollux.report AS
    SELECT DISTINCT ON (cluster, job_id) * FROM pollux.report_history ORDER BY cluster, job_id, attempt DESC, id DESC;
