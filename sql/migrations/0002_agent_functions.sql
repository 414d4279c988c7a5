-- What an agent may call. Every function takes the job's credentials first and checks them first.
--
-- SQLSTATEs of our own, which both ends know:
--   PX001 fenced: another polluxd leads      PX401 token refused            PX409 attempt over, or illegal transition
--   PX422 payload refused                    PX503 not set up yet (no secret)

-- pgcrypto in a schema that agents cannot reach; where a DBA has installed it elsewhere, that one is used.
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

-- Raises unless the token is the HMAC of exactly these credentials and the attempt is the newest known.
CREATE FUNCTION pollux.authorise(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text)
    RETURNS void
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
DECLARE
    -- Comparing under a key of the moment leaves a timing observer nothing to learn byte by byte.
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

-- A number of a JSON object: NULL where it is absent or null; raises where it is no finite number within bounds.
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
    SET search_path = pg_catalog, pollux
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

-- An object whose every member is null or a time of day that a clock can have shown; raises otherwise.
CREATE FUNCTION pollux.stamps_of(p_object jsonb, p_name text) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, pollux
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

CREATE FUNCTION pollux.instructions(p_cluster text, p_job bigint, p_attempt integer) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
    SELECT jsonb_build_object('drain', (
        SELECT max(r.id) FROM move r
        WHERE r.cluster = p_cluster AND r.job_id = p_job AND r.attempt = p_attempt AND r.step = 'draining'))
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

CREATE FUNCTION pollux.publish_v1(
    p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_payload jsonb) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
DECLARE
    big      constant double precision := 1e12;
    now_s    double precision := extract(epoch FROM clock_timestamp());
    params   jsonb := nullif(p_payload -> 'params', 'null');
    noise    jsonb := nullif(p_payload -> 'noise', 'null');
    limits   jsonb := nullif(p_payload -> 'limits', 'null');
    new_row  report;
    old_row  report;
BEGIN
    PERFORM authorise(p_cluster, p_job, p_attempt, p_uid, p_token);
    IF jsonb_typeof(p_payload) IS DISTINCT FROM 'object' OR pg_column_size(p_payload) > 16384 THEN
        RAISE EXCEPTION 'report: expected a JSON object of at most 16 KiB' USING ERRCODE = 'PX422';
    END IF;
    IF (p_payload -> 'v') IS DISTINCT FROM '1' THEN
        RAISE EXCEPTION 'report: expected version 1, got %', left(p_payload ->> 'v', 20) USING ERRCODE = 'PX422';
    END IF;
    IF jsonb_typeof(p_payload -> 'checkpointed') IS DISTINCT FROM 'boolean' THEN
        RAISE EXCEPTION 'report: checkpointed must be true or false' USING ERRCODE = 'PX422';
    END IF;

    new_row.cluster := p_cluster;
    new_row.job_id := p_job;
    new_row.attempt := p_attempt;
    new_row.uid := p_uid;
    new_row.received_at := clock_timestamp();
    new_row.at := to_timestamp(required_number(p_payload, 'at', 0, now_s + 300));
    IF params IS NOT NULL THEN
        new_row.alpha_grad := required_number(params, 'alpha_grad', 0, big);
        new_row.beta_grad := required_number(params, 'beta_grad', 0, big);
        new_row.alpha_local := required_number(params, 'alpha_local', 0, big);
        new_row.beta_local := required_number(params, 'beta_local', 0, big);
        new_row.alpha_node := required_number(params, 'alpha_node', 0, big);
        new_row.beta_node := required_number(params, 'beta_node', 0, big);
        new_row.gamma := required_number(params, 'gamma', 1, 10);
    END IF;
    IF noise IS NOT NULL THEN
        new_row.noise_sqr := required_number(noise, 'sqr', 0, 1e300);
        new_row.noise_var := required_number(noise, 'var', 0, 1e300);
    END IF;
    new_row.batch_initial := required_number(limits, 'initial', 1, 2147483647);
    new_row.batch_maximum := required_number(limits, 'maximum', new_row.batch_initial, 2147483647);
    new_row.local_min := required_number(limits, 'local_min', 1, 2147483647);
    new_row.local_max := required_number(limits, 'local_max', new_row.local_min, 2147483647);
    new_row.explored_gpus := required_number(p_payload, 'explored_gpus', 0, 1e6);
    new_row.explored_nodes := required_number(p_payload, 'explored_nodes', 0, 1e6);
    new_row.gpus := required_number(p_payload, 'gpus', 0, 1e6);
    new_row.nodes := required_number(p_payload, 'nodes', 0, 1e6);
    new_row.batch_size := required_number(p_payload, 'batch_size', 0, 2147483647);
    new_row.local_batch := required_number(p_payload, 'local_batch', 0, 2147483647);
    new_row.accumulation := required_number(p_payload, 'accumulation', 0, 2147483647);
    new_row.goodput := required_number(p_payload, 'goodput', 0, big);
    new_row.throughput := required_number(p_payload, 'throughput', 0, big);
    new_row.progress := required_number(p_payload, 'progress', 0, 1e15);
    new_row.target := number_of(p_payload, 'target', 0, 1e15);
    new_row.epoch := required_number(p_payload, 'epoch', 0, big);
    new_row.lr_factor := required_number(p_payload, 'lr_factor', 0, big);
    new_row.gain := required_number(p_payload, 'gain', 0, big);
    new_row.optimizer_steps := required_number(p_payload, 'optimizer_steps', 0, 1e15);
    new_row.checkpointed := (p_payload ->> 'checkpointed')::boolean;
    new_row.times := stamps_of(p_payload, 'times');
    new_row.restart_cost := number_of(p_payload, 'restart_cost', 0, 1e9);

    SELECT * INTO old_row FROM report r WHERE r.cluster = p_cluster AND r.job_id = p_job FOR UPDATE;
    INSERT INTO report SELECT (new_row).*
    ON CONFLICT (cluster, job_id) DO UPDATE SET (
        attempt, uid, at, received_at, alpha_grad, beta_grad, alpha_local, beta_local, alpha_node, beta_node, gamma,
        noise_sqr, noise_var, batch_initial, batch_maximum, local_min, local_max, explored_gpus, explored_nodes,
        gpus, nodes, batch_size, local_batch, accumulation, goodput, throughput, progress, target, epoch,
        lr_factor, gain, optimizer_steps, checkpointed, times, restart_cost) = ROW(
        excluded.attempt, excluded.uid, excluded.at, excluded.received_at, excluded.alpha_grad, excluded.beta_grad,
        excluded.alpha_local, excluded.beta_local, excluded.alpha_node, excluded.beta_node, excluded.gamma,
        excluded.noise_sqr, excluded.noise_var, excluded.batch_initial, excluded.batch_maximum, excluded.local_min,
        excluded.local_max, excluded.explored_gpus, excluded.explored_nodes, excluded.gpus, excluded.nodes,
        excluded.batch_size, excluded.local_batch, excluded.accumulation, excluded.goodput, excluded.throughput,
        excluded.progress, excluded.target, excluded.epoch, excluded.lr_factor, excluded.gain,
        excluded.optimizer_steps, excluded.checkpointed, excluded.times, excluded.restart_cost)
    WHERE report.attempt <= excluded.attempt;

    -- At most one history row a second: a job that publishes in a tight loop fills no disk.
    IF NOT EXISTS (SELECT FROM report_history h WHERE h.cluster = p_cluster AND h.job_id = p_job
                   AND h.received_at > new_row.received_at - interval '1 second') THEN
        INSERT INTO report_history (
            cluster, job_id, attempt, uid, at, received_at, alpha_grad, beta_grad, alpha_local, beta_local,
            alpha_node, beta_node, gamma, noise_sqr, noise_var, batch_initial, batch_maximum, local_min, local_max,
            explored_gpus, explored_nodes, gpus, nodes, batch_size, local_batch, accumulation, goodput, throughput,
            progress, target, epoch, lr_factor, gain, optimizer_steps, checkpointed, restart_cost)
        SELECT r.cluster, r.job_id, r.attempt, r.uid, r.at, r.received_at, r.alpha_grad, r.beta_grad, r.alpha_local,
            r.beta_local, r.alpha_node, r.beta_node, r.gamma, r.noise_sqr, r.noise_var, r.batch_initial,
            r.batch_maximum, r.local_min, r.local_max, r.explored_gpus, r.explored_nodes, r.gpus, r.nodes,
            r.batch_size, r.local_batch, r.accumulation, r.goodput, r.throughput, r.progress, r.target, r.epoch,
            r.lr_factor, r.gain, r.optimizer_steps, r.checkpointed, r.restart_cost
        FROM report r WHERE r.cluster = p_cluster AND r.job_id = p_job;
    END IF;

    IF jsonb_typeof(new_row.times -> 'first_step_at') = 'number'
       AND (old_row.attempt IS DISTINCT FROM p_attempt
            OR jsonb_typeof(old_row.times -> 'first_step_at') IS DISTINCT FROM 'number') THEN
        PERFORM pg_notify('pollux', 'first step of job ' || p_job);
    END IF;
    RETURN instructions(p_cluster, p_job, p_attempt);
END
$$;

-- The checkpoint that move `p_move` asked for is durable. True when the move now counts on it;
-- a repeated call (the first answer was lost) is true again. False: the move is over or was never this attempt's.
CREATE FUNCTION pollux.acknowledge_v1(
    p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text,
    p_move bigint, p_payload jsonb) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
DECLARE
    now_s double precision := extract(epoch FROM clock_timestamp());
    facts jsonb;
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
      AND r.step = 'draining';
    IF FOUND THEN
        UPDATE report SET checkpointed = true WHERE cluster = p_cluster AND job_id = p_job AND attempt = p_attempt;
        PERFORM pg_notify('pollux', 'checkpoint of job ' || p_job);
        RETURN true;
    END IF;
    RETURN EXISTS (
        SELECT FROM move r
        WHERE r.id = p_move AND r.cluster = p_cluster AND r.job_id = p_job AND r.attempt = p_attempt
          AND r.acknowledged IS NOT NULL AND r.step <> 'failed');
END
$$;

-- Fencing: raises unless `p_epoch` is the newest; holds a new leader back until this transaction is through.
CREATE FUNCTION pollux.fence(p_cluster text, p_epoch bigint) RETURNS void
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pollux
AS $$
BEGIN
    PERFORM FROM leader l WHERE l.cluster = p_cluster AND l.epoch = p_epoch FOR SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'epoch % no longer leads cluster % (now: %)', p_epoch, p_cluster,
            (SELECT l.epoch FROM leader l WHERE l.cluster = p_cluster) USING ERRCODE = 'PX001';
    END IF;
END
$$;
