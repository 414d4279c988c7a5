-- What an agent may call. Every function takes the job's credentials first, and checks them first.
--
-- SQLSTATEs of our own, which polluxd and the agent know:
--   PX001 fenced: another polluxd leads      PX401 token refused            PX409 attempt over, or illegal transition
--   PX422 payload refused                    PX503 not set up yet (no secret)

-- pgcrypto goes into a schema that agents cannot reach. Where a DBA has installed it elsewhere, that one is used.
CREATE SCHEMA IF NOT EXISTS pollux_crypto;
CREATE EXTENSION IF NOT EXISTS pgcrypto WITH SCHEMA pollux_crypto;
DO $$
DECLARE
    home text := (SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
                  WHERE e.extname = 'pgcrypto');
BEGIN
    EXECUTE format($body$
        CREATE FUNCTION pollux.hmac_sha256(message bytea, key bytea) RETURNS bytea
            LANGUAGE sql IMMUTABLE STRICT SET search_path = pg_catalog
            AS 'SELECT %I.hmac(message, key, ''sha256'')'
    $body$, home);
END
$$;

-- Raise unless the token is the HMAC of exactly these credentials and the attempt is the newest known.
CREATE FUNCTION pollux.authorise(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text)
    RETURNS void
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
DECLARE
    -- Both sides are hashed with a random key, so that the time of the comparison tells nothing about the token.
    nonce   bytea := convert_to(gen_random_uuid()::text, 'UTF8');
    message bytea := convert_to(p_cluster || ':' || p_job || ':' || p_attempt || ':' || p_uid, 'UTF8');
    given   bytea := convert_to(left(p_token, 128), 'UTF8');
    matched boolean := false;
    keys    integer := 0;
    candidate bytea;
    newest  integer;
    ended   boolean;
BEGIN
    FOR candidate IN SELECT s.key FROM secret s WHERE s.cluster = p_cluster ORDER BY s.id DESC LIMIT 2 LOOP
        keys := keys + 1;
        matched := matched OR coalesce(
            hmac_sha256(convert_to(encode(hmac_sha256(message, candidate), 'hex'), 'UTF8'), nonce)
            = hmac_sha256(given, nonce), false);
    END LOOP;
    IF keys = 0 THEN
        RAISE EXCEPTION 'no token secret is installed for cluster %: start polluxd, or run `polluxd migrate`', p_cluster
            USING ERRCODE = 'PX503';
    END IF;
    IF NOT matched THEN
        RAISE EXCEPTION 'token refused for job % attempt % of cluster %: the ticket is not of this job and attempt',
            p_job, p_attempt, p_cluster USING ERRCODE = 'PX401';
    END IF;
    SELECT greatest((SELECT r.attempt FROM report r WHERE r.cluster = p_cluster AND r.job_id = p_job),
                    (SELECT j.attempt FROM job j WHERE j.cluster = p_cluster AND j.job_id = p_job)),
           coalesce((SELECT j.ended_at IS NOT NULL AND p_attempt <= j.attempt FROM job j
                     WHERE j.cluster = p_cluster AND j.job_id = p_job), false)
      INTO newest, ended;
    IF p_attempt < newest THEN
        RAISE EXCEPTION 'job % is at attempt %: attempt % is over', p_job, newest, p_attempt USING ERRCODE = 'PX409';
    END IF;
    IF ended THEN
        RAISE EXCEPTION 'job % has ended with attempt %', p_job, p_attempt USING ERRCODE = 'PX409';
    END IF;
END
$$;

-- A number of a JSON object; NULL if absent or null. Raise unless it is a finite number within the bounds.
CREATE FUNCTION pollux.number_of(p_object jsonb, p_name text, p_low double precision, p_high double precision)
    RETURNS double precision
    LANGUAGE plpgsql IMMUTABLE
    SET search_path = pg_catalog
AS $$
DECLARE
    found text := jsonb_typeof(p_object -> p_name);
    value double precision;
BEGIN
    IF found IS NULL OR found = 'null' THEN
        RETURN NULL;
    END IF;
    IF found = 'number' THEN
        BEGIN
            value := (p_object ->> p_name)::double precision;
        EXCEPTION WHEN numeric_value_out_of_range THEN
            value := NULL;
        END;
    END IF;
    IF value IS NULL OR NOT (value >= p_low AND value <= p_high) THEN
        RAISE EXCEPTION 'report: % must be a finite number from % to %, got %',
            p_name, p_low, p_high, left(p_object ->> p_name, 40) USING ERRCODE = 'PX422';
    END IF;
    RETURN value;
END
$$;

CREATE FUNCTION pollux.required_number(p_object jsonb, p_name text, p_low double precision, p_high double precision)
    RETURNS double precision
    LANGUAGE plpgsql IMMUTABLE
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
DECLARE
    value double precision := number_of(p_object, p_name, p_low, p_high);
BEGIN
    IF value IS NULL THEN
        RAISE EXCEPTION 'report: % is missing', p_name USING ERRCODE = 'PX422';
    END IF;
    RETURN value;
END
$$;

-- An object of POSIX times, each null or not in the future. Raise otherwise.
CREATE FUNCTION pollux.stamps_of(p_object jsonb, p_name text) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
DECLARE
    stamps jsonb := coalesce(nullif(p_object -> p_name, 'null'), '{}');
    member text;
BEGIN
    IF jsonb_typeof(stamps) <> 'object' OR (SELECT count(*) FROM jsonb_object_keys(stamps)) > 16 THEN
        RAISE EXCEPTION 'report: % must be an object of at most 16 times', p_name USING ERRCODE = 'PX422';
    END IF;
    FOR member IN SELECT jsonb_object_keys(stamps) LOOP
        PERFORM number_of(stamps, member, 0, extract(epoch FROM clock_timestamp()) + 300);
    END LOOP;
    RETURN stamps;
END
$$;

-- A GPU type of at most 64 printable characters, or ''. Raise otherwise.
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

-- A text of a JSON object that must be one of `p_choices`; NULL if absent or null. Raise otherwise.
CREATE FUNCTION pollux.choice_of(p_object jsonb, p_name text, p_choices text[]) RETURNS text
    LANGUAGE plpgsql IMMUTABLE
    SET search_path = pg_catalog
AS $$
DECLARE
    value text := p_object ->> p_name;
BEGIN
    IF NOT value = ANY(p_choices) THEN
        RAISE EXCEPTION 'report: % must be one of %, got %', p_name, array_to_string(p_choices, ', '), left(value, 40)
            USING ERRCODE = 'PX422';
    END IF;
    RETURN value;
END
$$;

-- A JSON object, or NULL if absent or null. Raise otherwise.
CREATE FUNCTION pollux.object_of(p_object jsonb, p_name text) RETURNS jsonb
    LANGUAGE plpgsql IMMUTABLE
    SET search_path = pg_catalog
AS $$
DECLARE
    value jsonb := nullif(p_object -> p_name, 'null');
BEGIN
    IF value IS NOT NULL AND jsonb_typeof(value) <> 'object' THEN
        RAISE EXCEPTION 'report: % must be an object', p_name USING ERRCODE = 'PX422';
    END IF;
    RETURN value;
END
$$;

-- The row of a report's JSON payload. Raise, naming the member, where one makes no sense.
CREATE FUNCTION pollux.report_of(p_payload jsonb) RETURNS pollux.report
    LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
DECLARE
    big      constant double precision := 1e12;
    whole    constant double precision := 2147483647;
    params   jsonb;
    noise    jsonb;
    limits   jsonb;
    advice   jsonb;
    refusal  jsonb;
    decoded  report;
BEGIN
    IF jsonb_typeof(p_payload) IS DISTINCT FROM 'object' OR pg_column_size(p_payload) > 16384 THEN
        RAISE EXCEPTION 'report: expected a JSON object of at most 16 KiB' USING ERRCODE = 'PX422';
    END IF;
    IF (p_payload -> 'v') IS DISTINCT FROM '1' THEN
        RAISE EXCEPTION 'report: expected version 1, got %', left(p_payload ->> 'v', 20) USING ERRCODE = 'PX422';
    END IF;
    IF jsonb_typeof(p_payload -> 'checkpointed') IS DISTINCT FROM 'boolean' THEN
        RAISE EXCEPTION 'report: checkpointed must be true or false' USING ERRCODE = 'PX422';
    END IF;
    IF jsonb_typeof(nullif(p_payload -> 'prior_refuted', 'null')) <> 'boolean' THEN
        RAISE EXCEPTION 'report: prior_refuted must be true or false' USING ERRCODE = 'PX422';
    END IF;
    params := object_of(p_payload, 'params');
    noise := object_of(p_payload, 'noise');
    limits := object_of(p_payload, 'limits');
    advice := object_of(p_payload, 'advice');
    refusal := object_of(p_payload, 'resize_refused');

    decoded.at := to_timestamp(required_number(p_payload, 'at', 0, extract(epoch FROM clock_timestamp()) + 300));
    IF params IS NOT NULL THEN
        decoded.alpha_grad := required_number(params, 'alpha_grad', 0, big);
        decoded.beta_grad := required_number(params, 'beta_grad', 0, big);
        decoded.alpha_local := required_number(params, 'alpha_local', 0, big);
        decoded.beta_local := required_number(params, 'beta_local', 0, big);
        decoded.alpha_node := required_number(params, 'alpha_node', 0, big);
        decoded.beta_node := required_number(params, 'beta_node', 0, big);
        decoded.gamma := required_number(params, 'gamma', 1, 10);
        decoded.alpha_rack := number_of(params, 'alpha_rack', 0, big);
        decoded.beta_rack := number_of(params, 'beta_rack', 0, big);
    END IF;
    IF noise IS NOT NULL THEN
        decoded.noise_sqr := required_number(noise, 'sqr', 0, 1e300);
        decoded.noise_var := required_number(noise, 'var', 0, 1e300);
    END IF;
    decoded.batch_initial := required_number(limits, 'initial', 1, whole);
    decoded.batch_maximum := required_number(limits, 'maximum', decoded.batch_initial, whole);
    decoded.local_min := required_number(limits, 'local_min', 1, whole);
    decoded.local_max := required_number(limits, 'local_max', decoded.local_min, whole);
    decoded.explored_gpus := required_number(p_payload, 'explored_gpus', 0, 1e6);
    decoded.explored_nodes := required_number(p_payload, 'explored_nodes', 0, 1e6);
    decoded.measured_gpus := number_of(p_payload, 'measured_gpus', 0, 1e6);
    decoded.measured_nodes := number_of(p_payload, 'measured_nodes', 0, 1e6);
    decoded.prior_gpus := coalesce(number_of(p_payload, 'prior_gpus', 0, 1e6), 0);
    decoded.prior_nodes := coalesce(number_of(p_payload, 'prior_nodes', 0, 1e6), 0);
    decoded.prior_refuted := coalesce((p_payload ->> 'prior_refuted')::boolean, false);
    decoded.gpu_type := type_name(p_payload ->> 'gpu_type');
    decoded.gpus := required_number(p_payload, 'gpus', 0, 1e6);
    decoded.nodes := required_number(p_payload, 'nodes', 0, 1e6);
    decoded.batch_size := required_number(p_payload, 'batch_size', 0, whole);
    decoded.local_batch := required_number(p_payload, 'local_batch', 0, whole);
    decoded.accumulation := required_number(p_payload, 'accumulation', 0, whole);
    decoded.goodput := required_number(p_payload, 'goodput', 0, big);
    decoded.throughput := required_number(p_payload, 'throughput', 0, big);
    decoded.data_wait := number_of(p_payload, 'data_wait', 0, 1);
    decoded.progress := required_number(p_payload, 'progress', 0, 1e15);
    decoded.target := number_of(p_payload, 'target', 0, 1e15);
    decoded.epoch := required_number(p_payload, 'epoch', 0, big);
    decoded.lr_factor := required_number(p_payload, 'lr_factor', 0, big);
    decoded.gain := required_number(p_payload, 'gain', 0, big);
    decoded.optimizer_steps := required_number(p_payload, 'optimizer_steps', 0, 1e15);
    decoded.checkpointed := (p_payload ->> 'checkpointed')::boolean;
    decoded.times := stamps_of(p_payload, 'times');
    decoded.restart_cost := number_of(p_payload, 'restart_cost', 0, 1e9);
    decoded.mode := choice_of(p_payload, 'mode', ARRAY['observe', 'advise', 'enforce']);
    IF advice IS NOT NULL THEN
        decoded.advice := jsonb_build_object(
            'batch_size', required_number(advice, 'batch_size', 1, whole),
            'local_batch', required_number(advice, 'local_batch', 1, whole),
            'accumulation', required_number(advice, 'accumulation', 0, whole),
            'goodput_ratio', required_number(advice, 'goodput_ratio', 0, big));
    END IF;
    decoded.resize := choice_of(p_payload, 'resize', ARRAY['in-place', 'relaunch', 'requeue']);
    decoded.resized := coalesce(number_of(p_payload, 'resized', 0, 9e15), 0);
    IF refusal IS NOT NULL THEN
        decoded.resize_refused := jsonb_build_object(
            'id', required_number(refusal, 'id', 1, 9e15),
            'why', left(regexp_replace(coalesce(refusal ->> 'why', ''), '[^[:print:]]+', ' ', 'g'), 300));
    END IF;
    decoded.resize_cost := number_of(p_payload, 'resize_cost', 0, 1e9);
    RETURN decoded;
END
$$;

-- {"drain": move id or null} for a requeue or park; {"resize": {...} or null} for a move within the allocation.
CREATE FUNCTION pollux.instructions(p_cluster text, p_job bigint, p_attempt integer) RETURNS jsonb
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

CREATE FUNCTION pollux.instructions_v1(
    p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
BEGIN
    PERFORM authorise(p_cluster, p_job, p_attempt, p_uid, p_token);
    RETURN instructions(p_cluster, p_job, p_attempt);
END
$$;

-- Store a report and return the instructions. A new first step, resize or refusal wakes polluxd.
CREATE FUNCTION pollux.publish_v1(
    p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_payload jsonb) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
DECLARE
    fresh   report;
    former  report;
BEGIN
    PERFORM authorise(p_cluster, p_job, p_attempt, p_uid, p_token);
    fresh := report_of(p_payload);
    fresh.cluster := p_cluster;
    fresh.job_id := p_job;
    fresh.attempt := p_attempt;
    fresh.uid := p_uid;
    fresh.received_at := clock_timestamp();
    SELECT * INTO former FROM report r WHERE r.cluster = p_cluster AND r.job_id = p_job FOR UPDATE;
    INSERT INTO report SELECT (fresh).*
    ON CONFLICT (cluster, job_id) DO UPDATE SET (
        attempt, uid, at, received_at, alpha_grad, beta_grad, alpha_local, beta_local, alpha_node, beta_node,
        gamma, alpha_rack, beta_rack, noise_sqr, noise_var, batch_initial, batch_maximum, local_min, local_max,
        explored_gpus, explored_nodes, measured_gpus, measured_nodes, prior_gpus, prior_nodes, prior_refuted,
        gpu_type, gpus, nodes, batch_size, local_batch, accumulation, goodput, throughput, data_wait, progress,
        target, epoch, lr_factor, gain, optimizer_steps, checkpointed, times, restart_cost, mode, advice,
        resize, resized, resize_refused, resize_cost) = ROW(
        excluded.attempt, excluded.uid, excluded.at, excluded.received_at, excluded.alpha_grad,
        excluded.beta_grad, excluded.alpha_local, excluded.beta_local, excluded.alpha_node, excluded.beta_node,
        excluded.gamma, excluded.alpha_rack, excluded.beta_rack, excluded.noise_sqr, excluded.noise_var,
        excluded.batch_initial, excluded.batch_maximum, excluded.local_min, excluded.local_max,
        excluded.explored_gpus, excluded.explored_nodes, excluded.measured_gpus, excluded.measured_nodes,
        excluded.prior_gpus, excluded.prior_nodes, excluded.prior_refuted, excluded.gpu_type, excluded.gpus,
        excluded.nodes, excluded.batch_size, excluded.local_batch, excluded.accumulation, excluded.goodput,
        excluded.throughput, excluded.data_wait, excluded.progress, excluded.target, excluded.epoch,
        excluded.lr_factor, excluded.gain, excluded.optimizer_steps, excluded.checkpointed, excluded.times,
        excluded.restart_cost, excluded.mode, excluded.advice, excluded.resize, excluded.resized,
        excluded.resize_refused, excluded.resize_cost)
    WHERE report.attempt <= excluded.attempt;

    -- At most one history row a second: a job that publishes in a tight loop does not fill the disk.
    IF NOT EXISTS (SELECT FROM report_history h WHERE h.cluster = p_cluster AND h.job_id = p_job
                   AND h.received_at > fresh.received_at - interval '1 second') THEN
        INSERT INTO report_history SELECT (fresh).*;
    END IF;

    IF former.attempt IS DISTINCT FROM p_attempt THEN
        former.times := '{}';
        former.resized := 0;
        former.resize_refused := NULL;
    END IF;
    IF (fresh.times -> 'first_step_at') IS DISTINCT FROM (former.times -> 'first_step_at')
           AND jsonb_typeof(fresh.times -> 'first_step_at') = 'number'
       OR fresh.resized <> former.resized
       OR (fresh.resize_refused -> 'id') IS DISTINCT FROM (former.resize_refused -> 'id') THEN
        PERFORM pg_notify('pollux', 'report of job ' || p_job);
    END IF;
    RETURN instructions(p_cluster, p_job, p_attempt);
END
$$;

-- Store that the checkpoint of move `p_move` is durable. True when the move counts on it, also at a repeated call (the
-- first answer was lost). False: the move is over, or was never this attempt's. A job that is resized in place trains
-- on while it writes its checkpoint, so its acknowledgement does not say that a checkpoint exists.
CREATE FUNCTION pollux.acknowledge_v1(
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

-- Remember a fit for later runs. It replaces an earlier fit unless that one was measured on more GPUs or nodes; a fit that
-- this run refuted is replaced in any case.
CREATE FUNCTION pollux.remember_prior() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
BEGIN
    INSERT INTO prior AS p (cluster, uid, fingerprint, gpu_type, job_id, at, alpha_grad, beta_grad, alpha_local,
        beta_local, alpha_node, beta_node, gamma, alpha_rack, beta_rack, explored_gpus, explored_nodes)
    SELECT f.cluster, f.uid, f.fingerprint, f.gpu_type, NEW.job_id, NEW.received_at, NEW.alpha_grad, NEW.beta_grad,
           NEW.alpha_local, NEW.beta_local, NEW.alpha_node, NEW.beta_node, NEW.gamma, NEW.alpha_rack, NEW.beta_rack,
           coalesce(NEW.measured_gpus, NEW.explored_gpus), coalesce(NEW.measured_nodes, NEW.explored_nodes)
    FROM fingerprint f
    WHERE f.cluster = NEW.cluster AND f.job_id = NEW.job_id AND f.uid = NEW.uid AND f.attempt = NEW.attempt
      AND f.gpu_type = NEW.gpu_type
    ON CONFLICT (cluster, uid, fingerprint, gpu_type) DO UPDATE SET
        job_id = excluded.job_id, at = excluded.at, alpha_grad = excluded.alpha_grad,
        beta_grad = excluded.beta_grad, alpha_local = excluded.alpha_local, beta_local = excluded.beta_local,
        alpha_node = excluded.alpha_node, beta_node = excluded.beta_node, gamma = excluded.gamma,
        alpha_rack = excluded.alpha_rack, beta_rack = excluded.beta_rack,
        explored_gpus = excluded.explored_gpus, explored_nodes = excluded.explored_nodes
    WHERE NEW.prior_refuted
       OR excluded.explored_gpus >= p.explored_gpus AND excluded.explored_nodes >= p.explored_nodes;
    RETURN NULL;
END
$$;
CREATE TRIGGER remember_prior AFTER INSERT OR UPDATE ON pollux.report
    FOR EACH ROW WHEN (NEW.gamma IS NOT NULL AND coalesce(NEW.measured_gpus, NEW.explored_gpus) > 0)
    EXECUTE FUNCTION pollux.remember_prior();

-- Tell which training this attempt runs on which GPU type, and return what the same user's earlier runs measured there:
-- null, or {"params": {...}, "explored_gpus", "explored_nodes"}. Later reports of the attempt are remembered under the
-- fingerprint.
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

-- Least privilege: roles have what is granted here, and nothing else.
REVOKE ALL ON SCHEMA pollux FROM PUBLIC;
REVOKE ALL ON SCHEMA pollux_crypto FROM PUBLIC;
ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;
REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pollux FROM PUBLIC;

GRANT USAGE ON SCHEMA pollux TO pollux_agent, pollux_read;
GRANT EXECUTE ON FUNCTION
    pollux.publish_v1(text, bigint, integer, bigint, text, jsonb),
    pollux.instructions_v1(text, bigint, integer, bigint, text),
    pollux.acknowledge_v1(text, bigint, integer, bigint, text, bigint, jsonb),
    pollux.prior_v1(text, bigint, integer, bigint, text, text, text)
TO pollux_agent;

GRANT SELECT ON pollux.job, pollux.report, pollux.report_history, pollux.cycle, pollux.allocation,
    pollux.move, pollux.leader, pollux.setting, pollux.setting_audit, pollux.schema_migration, pollux.prior
TO pollux_read;
