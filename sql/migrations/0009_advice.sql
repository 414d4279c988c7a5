-- What a job's agent may change (observe, advise, enforce), and in mode advise what it would train with: for people to
-- read. polluxd takes the batch size of such a job for fixed, as its limits say.

ALTER TABLE pollux.report
    ADD COLUMN mode text CHECK (mode IN ('observe', 'advise', 'enforce')),
    ADD COLUMN advice jsonb CHECK (jsonb_typeof(advice) = 'object');
COMMENT ON COLUMN pollux.report.mode IS 'what the agent may change; NULL: not told';
COMMENT ON COLUMN pollux.report.advice IS
    'in mode advise: batch_size, local_batch, accumulation, and goodput_ratio over the batch size in use; NULL: none better';

CREATE OR REPLACE FUNCTION pollux.publish_v1(
    p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_payload jsonb) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
DECLARE
    big       constant double precision := 1e12;
    answer    jsonb := store_report(p_cluster, p_job, p_attempt, p_uid, p_token, p_payload);
    params    jsonb := nullif(p_payload -> 'params', 'null');
    refuted   jsonb := coalesce(nullif(p_payload -> 'prior_refuted', 'null'), 'false');
    said_mode text := p_payload ->> 'mode';
    said      jsonb := nullif(p_payload -> 'advice', 'null');
BEGIN
    IF jsonb_typeof(refuted) <> 'boolean' THEN
        RAISE EXCEPTION 'report: prior_refuted must be true or false' USING ERRCODE = 'PX422';
    END IF;
    IF said_mode NOT IN ('observe', 'advise', 'enforce') THEN
        RAISE EXCEPTION 'report: mode must be observe, advise or enforce' USING ERRCODE = 'PX422';
    END IF;
    IF said IS NOT NULL THEN
        IF jsonb_typeof(said) <> 'object' THEN
            RAISE EXCEPTION 'report: advice must be an object' USING ERRCODE = 'PX422';
        END IF;
        said := jsonb_build_object(
            'batch_size', required_number(said, 'batch_size', 1, 2147483647),
            'local_batch', required_number(said, 'local_batch', 1, 2147483647),
            'accumulation', required_number(said, 'accumulation', 0, 2147483647),
            'goodput_ratio', required_number(said, 'goodput_ratio', 0, big));
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
        data_wait = number_of(p_payload, 'data_wait', 0, 1),
        mode = said_mode,
        advice = said
    WHERE cluster = p_cluster AND job_id = p_job;
    RETURN answer;
END
$$;
