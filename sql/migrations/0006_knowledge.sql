-- Knowledge across runs, by GPU type; what a report says beyond version 1's members: the GPU type that it was measured on,
-- what of it rests on earlier runs, synchronisation over racks, and the share of the time spent waiting for data.

ALTER TABLE pollux.report
    ADD COLUMN alpha_rack pollux.amount,
    ADD COLUMN beta_rack pollux.amount,
    ADD COLUMN gpu_type text,
    ADD COLUMN measured_gpus integer CHECK (measured_gpus >= 0),
    ADD COLUMN measured_nodes integer CHECK (measured_nodes >= 0),
    ADD COLUMN prior_gpus integer CHECK (prior_gpus >= 0),
    ADD COLUMN prior_nodes integer CHECK (prior_nodes >= 0),
    ADD COLUMN prior_refuted boolean,
    ADD COLUMN data_wait pollux.amount CHECK (data_wait <= 1),
    ADD CHECK (num_nulls(alpha_rack, beta_rack) IN (0, 2));
COMMENT ON COLUMN pollux.report.measured_gpus IS 'most GPUs measured on gpu_type; explored_gpus counts every type';
COMMENT ON COLUMN pollux.report.prior_gpus IS 'most GPUs that the fit knows from earlier runs; 0: none of it is theirs';
COMMENT ON COLUMN pollux.report.data_wait IS 'share of the training time spent waiting for the data loader';

ALTER TABLE pollux.prior
    ADD COLUMN gpu_type text NOT NULL DEFAULT '',
    ADD COLUMN alpha_rack pollux.amount,
    ADD COLUMN beta_rack pollux.amount,
    DROP CONSTRAINT prior_pkey,
    ADD PRIMARY KEY (cluster, uid, fingerprint, gpu_type);
ALTER TABLE pollux.fingerprint ADD COLUMN gpu_type text NOT NULL DEFAULT '';

-- A fit replaces an earlier one unless that one had seen more GPUs or nodes: a later, smaller run knows less of them.
-- What a run has measured to be wrong does not stay, however much it had seen.
CREATE OR REPLACE FUNCTION pollux.remember_prior() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pollux
AS $$
BEGIN
    INSERT INTO prior AS p (cluster, uid, fingerprint, gpu_type, job_id, at, alpha_grad, beta_grad, alpha_local,
        beta_local, alpha_node, beta_node, gamma, alpha_rack, beta_rack, explored_gpus, explored_nodes)
    SELECT f.cluster, f.uid, f.fingerprint, f.gpu_type, NEW.job_id, NEW.received_at, NEW.alpha_grad, NEW.beta_grad,
           NEW.alpha_local, NEW.beta_local, NEW.alpha_node, NEW.beta_node, NEW.gamma, NEW.alpha_rack, NEW.beta_rack,
           coalesce(NEW.measured_gpus, NEW.explored_gpus), coalesce(NEW.measured_nodes, NEW.explored_nodes)
    FROM fingerprint f
    WHERE f.cluster = NEW.cluster AND f.job_id = NEW.job_id AND f.uid = NEW.uid AND f.attempt = NEW.attempt
      AND f.gpu_type = coalesce(NEW.gpu_type, '')
    ON CONFLICT (cluster, uid, fingerprint, gpu_type) DO UPDATE SET
        job_id = excluded.job_id, at = excluded.at, alpha_grad = excluded.alpha_grad,
        beta_grad = excluded.beta_grad, alpha_local = excluded.alpha_local, beta_local = excluded.beta_local,
        alpha_node = excluded.alpha_node, beta_node = excluded.beta_node, gamma = excluded.gamma,
        alpha_rack = excluded.alpha_rack, beta_rack = excluded.beta_rack,
        explored_gpus = excluded.explored_gpus, explored_nodes = excluded.explored_nodes
    WHERE coalesce(NEW.prior_refuted, false)
       OR excluded.explored_gpus >= p.explored_gpus AND excluded.explored_nodes >= p.explored_nodes;
    RETURN NULL;
END
$$;
-- Once per report: publish_v1 sets gpu_type in its second half, when the row is whole.
DROP TRIGGER remember_prior ON pollux.report;
CREATE TRIGGER remember_prior AFTER UPDATE OF gpu_type ON pollux.report
    FOR EACH ROW WHEN (NEW.gamma IS NOT NULL AND coalesce(NEW.measured_gpus, NEW.explored_gpus) > 0)
    EXECUTE FUNCTION pollux.remember_prior();

-- A name of few, printable characters, or ''; raises otherwise.
CREATE FUNCTION pollux.type_name(p_value text) RETURNS text
    LANGUAGE plpgsql IMMUTABLE
    SET search_path = pg_catalog
AS $$
BEGIN
    IF length(p_value) > 64 OR p_value ~ '[^[:print:]]' THEN
        RAISE EXCEPTION 'gpu_type: expected at most 64 printable characters' USING ERRCODE = 'PX422';
    END IF;
    RETURN coalesce(p_value, '');
END
$$;

-- Say which training this is, on which GPUs, and hear what is known of it there: null, or {"params": {...},
-- "explored_gpus", "explored_nodes"}. Reports of this attempt are remembered under the fingerprint from now on. Only the
-- same user's runs are known by it.
DROP FUNCTION pollux.prior_v1(text, bigint, integer, bigint, text, text);
CREATE FUNCTION pollux.prior_v1(
    p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_fingerprint text, p_gpu_type text)
    RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
DECLARE
    kind text;
BEGIN
    PERFORM authorise(p_cluster, p_job, p_attempt, p_uid, p_token);
    IF p_fingerprint IS NULL OR p_fingerprint !~ '^[0-9a-f]{16,64}$' THEN
        RAISE EXCEPTION 'fingerprint: expected 16 to 64 hexadecimal digits' USING ERRCODE = 'PX422';
    END IF;
    kind := type_name(p_gpu_type);
    INSERT INTO fingerprint (cluster, job_id, uid, attempt, fingerprint, gpu_type)
    VALUES (p_cluster, p_job, p_uid, p_attempt, p_fingerprint, kind)
    ON CONFLICT (cluster, job_id) DO UPDATE
    SET uid = excluded.uid, attempt = excluded.attempt, fingerprint = excluded.fingerprint,
        gpu_type = excluded.gpu_type;
    RETURN (
        SELECT jsonb_build_object(
            'params', jsonb_strip_nulls(jsonb_build_object(
                'alpha_grad', p.alpha_grad, 'beta_grad', p.beta_grad, 'alpha_local', p.alpha_local,
                'beta_local', p.beta_local, 'alpha_node', p.alpha_node, 'beta_node', p.beta_node, 'gamma', p.gamma,
                'alpha_rack', p.alpha_rack, 'beta_rack', p.beta_rack)),
            'explored_gpus', p.explored_gpus, 'explored_nodes', p.explored_nodes)
        FROM prior p
        WHERE p.cluster = p_cluster AND p.uid = p_uid AND p.fingerprint = p_fingerprint AND p.gpu_type = kind);
END
$$;

-- A report: what version 1 had, by its own function, then what came since. Members not given stay unknown.
ALTER FUNCTION pollux.publish_v1(text, bigint, integer, bigint, text, jsonb) RENAME TO store_report;
REVOKE EXECUTE ON FUNCTION pollux.store_report(text, bigint, integer, bigint, text, jsonb) FROM pollux_agent;
CREATE FUNCTION pollux.publish_v1(
    p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_payload jsonb) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
DECLARE
    big     constant double precision := 1e12;
    answer  jsonb := store_report(p_cluster, p_job, p_attempt, p_uid, p_token, p_payload);
    params  jsonb := nullif(p_payload -> 'params', 'null');
    refuted jsonb := coalesce(nullif(p_payload -> 'prior_refuted', 'null'), 'false');
BEGIN
    IF jsonb_typeof(refuted) <> 'boolean' THEN
        RAISE EXCEPTION 'report: prior_refuted must be true or false' USING ERRCODE = 'PX422';
    END IF;
    UPDATE report SET
        alpha_rack = number_of(params, 'alpha_rack', 0, big),
        beta_rack = number_of(params, 'beta_rack', 0, big),
        gpu_type = type_name(p_payload ->> 'gpu_type'),
        measured_gpus = number_of(p_payload, 'measured_gpus', 0, 1e6),
        measured_nodes = number_of(p_payload, 'measured_nodes', 0, 1e6),
        prior_gpus = coalesce(number_of(p_payload, 'prior_gpus', 0, 1e6), 0),
        prior_nodes = coalesce(number_of(p_payload, 'prior_nodes', 0, 1e6), 0),
        prior_refuted = refuted::boolean,
        data_wait = number_of(p_payload, 'data_wait', 0, 1)
    WHERE cluster = p_cluster AND job_id = p_job;
    RETURN answer;
END
$$;

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pollux FROM PUBLIC;
GRANT EXECUTE ON FUNCTION
    pollux.prior_v1(text, bigint, integer, bigint, text, text, text),
    pollux.publish_v1(text, bigint, integer, bigint, text, jsonb)
TO pollux_agent;
