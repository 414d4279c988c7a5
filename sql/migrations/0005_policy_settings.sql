-- Settings of the wider policy, the decision's explanation as data, and since when a waiting job has held nothing.

-- A JSON object whose every member is a number from `p_low` up.
CREATE FUNCTION pollux.is_amounts(p_value jsonb, p_low double precision, p_exclusive boolean, p_whole boolean)
    RETURNS boolean
    LANGUAGE sql IMMUTABLE
    SET search_path = pg_catalog
AS $$
    SELECT CASE WHEN jsonb_typeof(p_value) = 'object' THEN NOT EXISTS (
        SELECT FROM jsonb_each(p_value) AS e
        WHERE CASE WHEN jsonb_typeof(e.value) <> 'number' THEN true
              ELSE (e.value)::double precision < p_low OR (p_exclusive AND (e.value)::double precision = p_low)
                   OR (p_whole AND (e.value)::numeric % 1 <> 0) END)
    ELSE false END
$$;

ALTER TABLE pollux.setting DROP CONSTRAINT setting_value;
ALTER TABLE pollux.setting ADD CONSTRAINT setting_value CHECK (CASE
    WHEN name = 'power' THEN CASE jsonb_typeof(value)
        WHEN 'number' THEN (value)::double precision <= 1 ELSE value = '"-inf"' END
    WHEN name IN ('account_weights', 'user_weights') THEN pollux.is_amounts(value, 0, true, false)
    WHEN name IN ('account_ceilings', 'user_ceilings', 'account_guarantees', 'user_guarantees')
        THEN pollux.is_amounts(value, 0, false, true)
    WHEN name IN ('paused', 'partial_nodes') THEN jsonb_typeof(value) = 'boolean'
    WHEN name = 'gpu_counts' THEN jsonb_typeof(value) = 'string'
        AND value #>> '{}' ~ '^(any|powers-of-two|whole-nodes|[1-9][0-9]*(,[1-9][0-9]*)*)$'
    WHEN name = 'starvation_bound' THEN CASE jsonb_typeof(value)
        WHEN 'number' THEN (value)::double precision > 0 ELSE value = 'null' END
    WHEN name = 'remaining_work_power' THEN CASE jsonb_typeof(value)
        WHEN 'number' THEN abs((value)::double precision) <= 4 ELSE false END
    WHEN name = 'hysteresis' THEN CASE jsonb_typeof(value)
        WHEN 'number' THEN (value)::double precision BETWEEN 0 AND 1 ELSE false END
    ELSE false END);

ALTER TABLE pollux.allocation ADD COLUMN explanation jsonb;

ALTER TABLE pollux.job ADD COLUMN held_at timestamptz;
COMMENT ON COLUMN pollux.job.held_at IS 'when it was last seen to hold GPUs';

-- New functions are nobody's but the owner's (the default privileges of 0003 hold for this role's functions only).
REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pollux FROM PUBLIC;
