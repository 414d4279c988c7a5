-- A row of pollux.allocation holds from its cycle on, until another cycle decides otherwise on the job, or not on it.
ALTER TABLE pollux.allocation ADD COLUMN until bigint;
COMMENT ON COLUMN pollux.allocation.until IS 'the first cycle for which it does not hold any more; null: it holds';
UPDATE pollux.allocation a SET until = coalesce((
    SELECT min(n.id) FROM pollux.cycle c JOIN pollux.cycle n ON n.cluster = c.cluster AND n.id > c.id
    WHERE c.id = a.cycle_id), a.cycle_id + 1);
CREATE INDEX allocation_until ON pollux.allocation (until, cycle_id);

ALTER TABLE pollux.cycle ADD COLUMN plan_digest text;
COMMENT ON COLUMN pollux.cycle.plan_digest IS 'SHA-256 of all decisions of the cycle, the unchanged ones included';
