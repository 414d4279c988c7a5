-- Weights by QOS and by job, beside those of accounts and users.

ALTER TABLE pollux.setting DROP CONSTRAINT setting_value;
ALTER TABLE pollux.setting ADD CONSTRAINT setting_value CHECK (CASE
    WHEN name = 'power' THEN CASE jsonb_typeof(value)
        WHEN 'number' THEN (value)::double precision <= 1 ELSE value = '"-inf"' END
    WHEN name IN ('account_weights', 'user_weights', 'qos_weights', 'job_weights')
        THEN pollux.is_amounts(value, 0, true, false)
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
