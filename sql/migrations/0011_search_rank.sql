-- A trial's rank in its search shifts weight among the trials of this search.

ALTER TABLE pollux.report_history ADD COLUMN search_rank pollux.amount;
COMMENT ON COLUMN pollux.report_history.search_rank IS 'a trial''s claimed rank in its search, from 0 to 1 (the best); NULL: none';
CREATE OR REPLACE VIEW pollux.report AS
    SELECT DISTINCT ON (cluster, job_id) * FROM pollux.report_history ORDER BY cluster, job_id, attempt DESC, id DESC;
