-- Moves within a job's allocation: resized in place, or relaunched. What the agent is told of them, what it says of them,
-- and the step at which it is asked for a companion job. And the lookup of earlier runs that agents of an older version
-- call, which 0006 had taken away: an upgrade must not need them all replaced at once.

CREATE OR REPLACE FUNCTION pollux.step_rank(step text) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT
    SET search_path = pg_catalog
AS $$
    SELECT array_position(
        ARRAY['planned', 'draining', 'recruiting', 'checkpointed', 'requeued', 'configured', 'started',
              'training', 'parked', 'failed'], step)
$$;

ALTER TABLE pollux.report
    ADD COLUMN resize text CHECK (resize IN ('in-place', 'relaunch', 'requeue')),
    ADD COLUMN resized bigint CHECK (resized >= 0),
    ADD COLUMN resize_refused jsonb CHECK (jsonb_typeof(resize_refused) = 'object'),
    ADD COLUMN resize_cost pollux.amount;
COMMENT ON COLUMN pollux.report.resize IS 'the fastest way in which the job''s size can be changed; NULL: requeue';
COMMENT ON COLUMN pollux.report.resized IS 'newest resize or relaunch in effect (move.id); NULL or 0: none in this attempt';
COMMENT ON COLUMN pollux.report.resize_refused IS '{"id", "why"}: a resize or relaunch that the agent could not carry out';
COMMENT ON COLUMN pollux.report.resize_cost IS 'seconds between the optimizer steps before and after the newest resize';

-- Those that went wrong once begun are looked at every cycle: of a job's attempt there are few.
CREATE INDEX move_broken ON pollux.move (cluster, job_id)
    WHERE step = 'failed' AND path IN ('resize', 'relaunch');

-- {"drain": id or null} for a requeue or park; {"resize": {...} or null} for a move within the allocation.
CREATE OR REPLACE FUNCTION pollux.instructions(p_cluster text, p_job bigint, p_attempt integer) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
    SELECT jsonb_build_object(
        'drain', (
            SELECT max(r.id) FROM move r
            WHERE r.cluster = p_cluster AND r.job_id = p_job AND r.attempt = p_attempt AND r.step = 'draining'
              AND r.path NOT IN ('resize', 'relaunch')),
        'resize', (
            SELECT jsonb_build_object('id', r.id, 'path', r.path, 'kind', CASE WHEN k.grows THEN 'grow' ELSE 'shrink' END,
                'nodes', r.target -> 'nodes', 'gpus_per_node', r.target -> 'gpus_per_node', 'step', r.step)
            FROM move r, LATERAL (
                SELECT jsonb_array_length(r.target -> 'nodes') > jsonb_array_length(r.source -> 'nodes') AS grows) k
            WHERE r.cluster = p_cluster AND r.job_id = p_job AND r.attempt = p_attempt
              AND r.path IN ('resize', 'relaunch')
              AND CASE WHEN k.grows THEN r.step IN ('recruiting', 'configured', 'started') ELSE r.step = 'draining' END
            ORDER BY r.id DESC LIMIT 1))
$$;

-- A move that the agent could not carry out, with at most 300 printable characters of why; NULL where there is none.
CREATE FUNCTION pollux.refusal_of(p_payload jsonb) RETURNS jsonb
    LANGUAGE plpgsql IMMUTABLE
    SET search_path = pg_catalog, pollux
AS $$
DECLARE
    said jsonb := nullif(p_payload -> 'resize_refused', 'null');
BEGIN
    IF said IS NULL THEN
        RETURN NULL;
    END IF;
    IF jsonb_typeof(said) <> 'object' THEN
        RAISE EXCEPTION 'report: resize_refused must be an object' USING ERRCODE = 'PX422';
    END IF;
    RETURN jsonb_build_object(
        'id', required_number(said, 'id', 1, 9e15),
        'why', left(regexp_replace(coalesce(said ->> 'why', ''), '[^[:print:]]+', ' ', 'g'), 300));
END
$$;

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
    way       text := p_payload ->> 'resize';
    done      bigint := coalesce(number_of(p_payload, 'resized', 0, 9e15), 0);
    refusal   jsonb := refusal_of(p_payload);
    news      boolean;
BEGIN
    IF jsonb_typeof(refuted) <> 'boolean' THEN
        RAISE EXCEPTION 'report: prior_refuted must be true or false' USING ERRCODE = 'PX422';
    END IF;
    IF said_mode NOT IN ('observe', 'advise', 'enforce') THEN
        RAISE EXCEPTION 'report: mode must be observe, advise or enforce' USING ERRCODE = 'PX422';
    END IF;
    IF way NOT IN ('in-place', 'relaunch', 'requeue') THEN
        RAISE EXCEPTION 'report: resize must be in-place, relaunch or requeue' USING ERRCODE = 'PX422';
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
    SELECT coalesce(r.resized, 0) <> done OR (r.resize_refused -> 'id') IS DISTINCT FROM (refusal -> 'id') INTO news
    FROM report r WHERE r.cluster = p_cluster AND r.job_id = p_job;
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
        advice = said,
        resize = way,
        resized = done,
        resize_refused = refusal,
        resize_cost = number_of(p_payload, 'resize_cost', 0, 1e9)
    WHERE cluster = p_cluster AND job_id = p_job;
    IF news AND (done > 0 OR refusal IS NOT NULL) THEN
        PERFORM pg_notify('pollux', 'resize of job ' || p_job);
    END IF;
    RETURN answer;
END
$$;

-- As before, but a job that is resized in place writes its checkpoint while it trains on: that it acknowledged does not
-- say that one is there.
CREATE OR REPLACE FUNCTION pollux.acknowledge_v1(
    p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text,
    p_move bigint, p_payload jsonb) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
DECLARE
    now_s double precision := extract(epoch FROM clock_timestamp());
    facts jsonb;
    way   text;
BEGIN
    PERFORM authorise(p_cluster, p_job, p_attempt, p_uid, p_token);
    IF jsonb_typeof(p_payload) IS DISTINCT FROM 'object' THEN
        RAISE EXCEPTION 'acknowledgement: expected a JSON object' USING ERRCODE = 'PX422';
    END IF;
    facts := jsonb_strip_nulls(jsonb_build_object(
        'last_step_at', number_of(p_payload, 'last_step_at', 0, now_s + 300),
        'stopped_at', number_of(p_payload, 'stopped_at', 0, now_s + 300),
        'checkpoint_s', number_of(p_payload, 'checkpoint_s', 0, 1e9),
        'step', number_of(p_payload, 'step', 0, 1e15)));
    UPDATE move r
    SET step = 'checkpointed', times = r.times || jsonb_build_object('checkpointed', now_s), acknowledged = facts
    WHERE r.id = p_move AND r.cluster = p_cluster AND r.job_id = p_job AND r.attempt = p_attempt
      AND r.step = 'draining'
    RETURNING r.path INTO way;
    IF FOUND THEN
        IF way <> 'resize' THEN
            UPDATE report SET checkpointed = true
            WHERE cluster = p_cluster AND job_id = p_job AND attempt = p_attempt;
        END IF;
        PERFORM pg_notify('pollux', 'acknowledged by job ' || p_job);
        RETURN true;
    END IF;
    RETURN EXISTS (
        SELECT FROM move r
        WHERE r.id = p_move AND r.cluster = p_cluster AND r.job_id = p_job AND r.attempt = p_attempt
          AND r.acknowledged IS NOT NULL AND r.step <> 'failed');
END
$$;

CREATE FUNCTION pollux.prior_v1(
    p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_fingerprint text) RETURNS jsonb
    LANGUAGE sql SECURITY DEFINER
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
    SELECT prior_v1(p_cluster, p_job, p_attempt, p_uid, p_token, p_fingerprint, '')
$$;
COMMENT ON FUNCTION pollux.prior_v1(text, bigint, integer, bigint, text, text) IS
    'for agents that know nothing of GPU types';

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pollux FROM PUBLIC;
GRANT EXECUTE ON FUNCTION pollux.prior_v1(text, bigint, integer, bigint, text, text) TO pollux_agent;
