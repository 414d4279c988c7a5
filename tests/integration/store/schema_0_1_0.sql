CREATE SCHEMA pollux;
ALTER SCHEMA pollux OWNER TO pollux_daemon;
CREATE SCHEMA pollux_crypto;
ALTER SCHEMA pollux_crypto OWNER TO pollux_daemon;
CREATE SCHEMA pollux_roles;
ALTER SCHEMA pollux_roles OWNER TO postgres;
CREATE EXTENSION IF NOT EXISTS pgcrypto WITH SCHEMA pollux_crypto;
COMMENT ON EXTENSION pgcrypto IS 'cryptographic functions';
CREATE DOMAIN pollux.amount AS double precision
	CONSTRAINT amount_check CHECK (((VALUE >= (0)::double precision) AND (VALUE < 'Infinity'::double precision)));
ALTER DOMAIN pollux.amount OWNER TO pollux_daemon;
CREATE DOMAIN pollux.cluster_name AS text
	CONSTRAINT cluster_name_check CHECK (((VALUE <> ''::text) AND (VALUE !~ '[:[:space:]]'::text) AND (octet_length(VALUE) <= 40)));
ALTER DOMAIN pollux.cluster_name OWNER TO pollux_daemon;
CREATE DOMAIN pollux.finite AS double precision
	CONSTRAINT finite_check CHECK (((VALUE > '-Infinity'::double precision) AND (VALUE < 'Infinity'::double precision)));
ALTER DOMAIN pollux.finite OWNER TO pollux_daemon;
CREATE TYPE pollux.standing AS (
	leave boolean,
	moving boolean,
	attempt integer,
	received_at timestamp with time zone,
	news jsonb
);
ALTER TYPE pollux.standing OWNER TO pollux_daemon;
COMMENT ON COLUMN pollux.standing.moving IS 'a move of the job is under way: there may be instructions';
COMMENT ON COLUMN pollux.standing.attempt IS 'of the newest report, as received_at and news; NULL: none yet';
COMMENT ON COLUMN pollux.standing.news IS 'the parts of a report whose change wakes polluxd: first step, resize, refusal';
CREATE FUNCTION pollux.acknowledge_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_move bigint, p_payload jsonb) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pollux', 'pg_temp'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
DECLARE
    now_s double precision := extract(epoch FROM clock_timestamp());
    facts jsonb;
    step  text;
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
    step := (SELECT m.step FROM move m
             WHERE m.id = p_move AND m.cluster = p_cluster AND m.job_id = p_job AND m.attempt = p_attempt);
    IF EXISTS (SELECT FROM acknowledgement a WHERE a.move_id = p_move AND a.cluster = p_cluster
               AND a.job_id = p_job AND a.attempt = p_attempt) THEN
        RETURN step IS DISTINCT FROM 'failed';
    END IF;
    IF step IS DISTINCT FROM 'draining' THEN
        RETURN false;
    END IF;
    INSERT INTO acknowledgement (cluster, job_id, attempt, move_id, facts)
    VALUES (p_cluster, p_job, p_attempt, p_move, facts);
    PERFORM pg_notify('pollux', '');
    RETURN true;
END
$$;
ALTER FUNCTION pollux.acknowledge_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_move bigint, p_payload jsonb) OWNER TO pollux_daemon;
CREATE FUNCTION pollux.admit_users(p_cluster text) RETURNS TABLE(admitted text, trouble text)
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pollux', 'pg_temp'
    AS $$
DECLARE
    most     constant integer := greatest(current_setting('max_connections')::integer / 10, 4);
    crowded  constant boolean := (SELECT count(*) FROM job j WHERE j.cluster = p_cluster AND j.ended_at IS NULL
                                  AND j.gpus > 0) > current_setting('max_connections')::integer * 0.6;
    wanted   record;
BEGIN
    FOR wanted IN
        SELECT u.uid, k.id AS secret_id, k.key, agent_role_name(p_cluster, u.uid, k.key) AS role,
               -- In powers of two, so that a job that comes or goes seldom changes it.
               least(most, (2 ^ ceil(log(2, u.jobs + 3)))::integer) AS connections,
               crowded OR u.jobs + 2 > most AS leave
        FROM (SELECT j.uid, count(*) AS jobs FROM job j
              WHERE j.cluster = p_cluster AND j.ended_at IS NULL GROUP BY j.uid) u
        CROSS JOIN (SELECT * FROM secret s WHERE s.cluster = p_cluster ORDER BY s.id DESC LIMIT 2) k
    LOOP
        admitted := wanted.role;
        BEGIN
            trouble := NULL;
            IF pollux_roles.admit(wanted.role, agent_password(wanted.role, wanted.key), wanted.connections) THEN
                RETURN NEXT;
            END IF;
            INSERT INTO agent_role AS a (role, cluster, uid, secret_id, connections, leave)
            VALUES (wanted.role, p_cluster, wanted.uid, wanted.secret_id, wanted.connections, wanted.leave)
            ON CONFLICT (role) DO UPDATE
            SET connections = excluded.connections, leave = excluded.leave, secret_id = excluded.secret_id, wanted_at = now()
            WHERE a.connections <> excluded.connections OR a.leave <> excluded.leave
               OR a.secret_id <> excluded.secret_id OR a.wanted_at < now() - interval '1 hour';
        EXCEPTION WHEN OTHERS THEN
            trouble := SQLERRM;
            RETURN NEXT;
        END;
    END LOOP;
END
$$;
ALTER FUNCTION pollux.admit_users(p_cluster text) OWNER TO pollux_daemon;
CREATE FUNCTION pollux.agent_password(p_role text, p_key bytea) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pollux', 'pg_temp'
    AS $$
    SELECT encode(hmac_sha256(convert_to('password:' || p_role, 'UTF8'), p_key), 'hex')
$$;
ALTER FUNCTION pollux.agent_password(p_role text, p_key bytea) OWNER TO pollux_daemon;
CREATE FUNCTION pollux.agent_role_name(p_cluster text, p_uid bigint, p_key bytea) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pollux', 'pg_temp'
    AS $$
    SELECT 'pollux_' || p_cluster || '_' || p_uid || '_' || left(encode(hmac_sha256('role', p_key), 'hex'), 4)
$$;
ALTER FUNCTION pollux.agent_role_name(p_cluster text, p_uid bigint, p_key bytea) OWNER TO pollux_daemon;
CREATE FUNCTION pollux.audit_setting() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pollux', 'pg_temp'
    AS $$
DECLARE
    who text := coalesce(nullif(current_setting('pollux.who', true), ''), session_user);
BEGIN
    IF TG_OP <> 'UPDATE' OR OLD.value <> NEW.value THEN
        INSERT INTO setting_audit (cluster, who, name, from_value, to_value)
        VALUES (coalesce(NEW.cluster, OLD.cluster), who, coalesce(NEW.name, OLD.name), OLD.value, NEW.value);
    END IF;
    RETURN NULL;
END
$$;
ALTER FUNCTION pollux.audit_setting() OWNER TO pollux_daemon;
CREATE FUNCTION pollux.authorise(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text) RETURNS pollux.standing
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pollux', 'pg_temp'
    AS $$
DECLARE
    -- Both sides are hashed with a random key, so that the time of the comparison tells nothing about the token.
    nonce    bytea := uuid_send(gen_random_uuid());
    made_at  text := split_part(p_token, '.', 1);
    message  bytea := convert_to(concat_ws(':', p_cluster, p_job, p_attempt, p_uid, made_at), 'UTF8');
    given    bytea := sha256(nonce || convert_to(substr(p_token, length(made_at) + 2), 'UTF8'));
    known    record;
BEGIN
    SELECT a.role, a.leave, k.keys, k.matched, j.uid, j.attempt, j.submitted_at, j.ended_at,
           h.attempt AS reported, h.received_at, h.news,
           EXISTS (SELECT FROM move m WHERE m.cluster = p_cluster AND m.job_id = p_job
                   AND m.step NOT IN ('training', 'parked', 'failed')) AS moving
    INTO known
    FROM (
        SELECT count(*) AS keys,
               bool_or(sha256(nonce || convert_to(encode(hmac_sha256(message, s.key), 'hex'), 'UTF8')) = given) AS matched
        FROM (SELECT s.key FROM secret s WHERE s.cluster = p_cluster ORDER BY s.id DESC LIMIT 2) s) k
    LEFT JOIN agent_role a ON a.role = session_user AND a.cluster = p_cluster AND a.uid = p_uid
    LEFT JOIN job j ON j.cluster = p_cluster AND j.job_id = p_job
    LEFT JOIN LATERAL (
        SELECT r.attempt, r.received_at,
               jsonb_build_array(r.times -> 'first_step_at', r.resized, r.resize_refused -> 'id') AS news
        FROM report_history r WHERE r.cluster = p_cluster AND r.job_id = p_job
        ORDER BY r.attempt DESC, r.id DESC LIMIT 1) h ON true;
    IF known.role IS NULL THEN
        RAISE EXCEPTION 'role % does not report for user % of cluster %', session_user, p_uid, p_cluster
            USING ERRCODE = 'PX401';
    END IF;
    IF known.keys = 0 THEN
        RAISE EXCEPTION 'no secret is installed for cluster %: run `polluxd migrate`', p_cluster
            USING ERRCODE = 'PX503';
    END IF;
    IF known.matched IS NOT TRUE OR p_job IS NULL OR p_attempt IS NULL THEN
        RAISE EXCEPTION 'token refused for job % attempt % of cluster %: the ticket is not of this job and attempt',
            p_job, p_attempt, p_cluster USING ERRCODE = 'PX401';
    END IF;
    IF known.uid IS NULL THEN
        RAISE EXCEPTION 'polluxd has not seen job % yet: try again', p_job USING ERRCODE = 'PX503';
    END IF;
    IF known.uid <> p_uid THEN
        RAISE EXCEPTION 'job % is not a job of user %', p_job, p_uid USING ERRCODE = 'PX401';
    END IF;
    -- The clocks of Slurm's machines may differ by Munge's 5 minutes.
    IF to_timestamp(made_at::double precision) < known.submitted_at - interval '5 minutes' THEN
        RAISE EXCEPTION 'the token is older than job %: it is of an earlier job with this id', p_job
            USING ERRCODE = 'PX401';
    END IF;
    IF p_attempt < greatest(known.attempt, known.reported) THEN
        RAISE EXCEPTION 'job % is at attempt %: attempt % is over',
            p_job, greatest(known.attempt, known.reported), p_attempt USING ERRCODE = 'PX409';
    END IF;
    IF known.ended_at IS NOT NULL AND p_attempt <= known.attempt THEN
        RAISE EXCEPTION 'job % has ended with attempt %', p_job, known.attempt USING ERRCODE = 'PX409';
    END IF;
    RETURN ROW(known.leave, known.moving, known.reported, known.received_at, known.news)::standing;
END
$$;
ALTER FUNCTION pollux.authorise(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text) OWNER TO pollux_daemon;
CREATE FUNCTION pollux.choice_of(p_object jsonb, p_name text, p_choices text[]) RETURNS text
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO 'pg_catalog'
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
ALTER FUNCTION pollux.choice_of(p_object jsonb, p_name text, p_choices text[]) OWNER TO pollux_daemon;
CREATE FUNCTION pollux.dismiss_users(p_cluster text) RETURNS SETOF text
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pollux', 'pg_temp'
    AS $$
DECLARE
    idle text;
BEGIN
    FOR idle IN
        SELECT a.role FROM agent_role a WHERE a.cluster = p_cluster AND (
            a.wanted_at < now() - interval '1 day'
            AND NOT EXISTS (SELECT FROM job j WHERE j.cluster = p_cluster AND j.uid = a.uid AND j.ended_at IS NULL)
            OR a.secret_id NOT IN (SELECT s.id FROM secret s WHERE s.cluster = p_cluster ORDER BY s.id DESC LIMIT 2))
    LOOP
        PERFORM pollux_roles.dismiss(idle);
        DELETE FROM agent_role a WHERE a.role = idle;
        RETURN NEXT idle;
    END LOOP;
END
$$;
ALTER FUNCTION pollux.dismiss_users(p_cluster text) OWNER TO pollux_daemon;
CREATE FUNCTION pollux.fence(p_cluster text, p_epoch bigint) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pollux', 'pg_temp'
    AS $$
BEGIN
    PERFORM FROM leader l WHERE l.cluster = p_cluster AND l.epoch = p_epoch FOR SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'epoch % no longer leads cluster % (now: %)', p_epoch, p_cluster,
            (SELECT l.epoch FROM leader l WHERE l.cluster = p_cluster) USING ERRCODE = 'PX001';
    END IF;
END
$$;
ALTER FUNCTION pollux.fence(p_cluster text, p_epoch bigint) OWNER TO pollux_daemon;
CREATE FUNCTION pollux.guard_move() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pollux', 'pg_temp'
    AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF NEW.step <> 'planned' THEN
            RAISE EXCEPTION 'a move begins at step planned, not %', NEW.step USING ERRCODE = 'PX409';
        END IF;
    ELSE
        IF (OLD.id, OLD.cluster, OLD.job_id, OLD.attempt, OLD.path, OLD.source, OLD.target, OLD.nonce)
           IS DISTINCT FROM (NEW.id, NEW.cluster, NEW.job_id, NEW.attempt, NEW.path, NEW.source, NEW.target, NEW.nonce) THEN
            RAISE EXCEPTION 'move %: only its step, times and detail may change', OLD.id
                USING ERRCODE = 'PX409';
        END IF;
        IF OLD.step <> NEW.step THEN
            IF OLD.step IN ('training', 'parked', 'failed')
               OR step_rank(NEW.step) <= step_rank(OLD.step)
               OR (NEW.path = 'park') = (NEW.step = 'training')
                  AND NEW.step IN ('training', 'parked') THEN
                RAISE EXCEPTION 'move % (%) cannot go from step % to %',
                    OLD.id, OLD.path, OLD.step, NEW.step USING ERRCODE = 'PX409';
            END IF;
        END IF;
    END IF;
    IF jsonb_typeof(NEW.times -> NEW.step) IS DISTINCT FROM 'number' THEN
        RAISE EXCEPTION 'move %: step % has no time', NEW.id, NEW.step USING ERRCODE = 'PX422';
    END IF;
    RETURN NEW;
END
$$;
ALTER FUNCTION pollux.guard_move() OWNER TO pollux_daemon;
CREATE FUNCTION pollux.hmac_sha256(message bytea, key bytea) RETURNS bytea
    LANGUAGE plpgsql IMMUTABLE STRICT
    SET search_path TO 'pg_catalog'
    AS $$BEGIN RETURN pollux_crypto.hmac(message, key, 'sha256'); END$$;
ALTER FUNCTION pollux.hmac_sha256(message bytea, key bytea) OWNER TO pollux_daemon;
CREATE FUNCTION pollux.instructions(p_cluster text, p_job bigint, p_attempt integer) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path TO 'pg_catalog', 'pollux', 'pg_temp'
    AS $$
BEGIN
    RETURN jsonb_build_object(
        'drain', (
            SELECT max(r.id) FROM move r
            WHERE r.cluster = p_cluster AND r.job_id = p_job AND r.attempt = p_attempt AND r.step = 'draining'
              AND r.path NOT IN ('resize', 'relaunch')
              AND NOT EXISTS (SELECT FROM acknowledgement a WHERE a.move_id = r.id)),
        'resize', (
            SELECT jsonb_build_object('id', r.id, 'path', r.path, 'kind', CASE WHEN k.grows THEN 'grow' ELSE 'shrink' END,
                'nodes', r.target -> 'nodes', 'gpus_per_node', r.target -> 'gpus_per_node', 'step', r.step)
                || CASE WHEN k.grows THEN jsonb_build_object('nonce', r.nonce) ELSE '{}' END
            FROM move r, LATERAL (
                SELECT jsonb_array_length(r.target -> 'nodes') > jsonb_array_length(r.source -> 'nodes') AS grows) k
            WHERE r.cluster = p_cluster AND r.job_id = p_job AND r.attempt = p_attempt
              AND r.path IN ('resize', 'relaunch')
              AND CASE WHEN k.grows THEN r.step IN ('recruiting', 'configured', 'started')
                  ELSE r.step = 'draining' AND NOT EXISTS (SELECT FROM acknowledgement a WHERE a.move_id = r.id) END
            ORDER BY r.id DESC LIMIT 1))
        || CASE WHEN (SELECT a.leave FROM agent_role a WHERE a.role = session_user) THEN '{"leave": true}' ELSE '{}' END::jsonb;
END
$$;
ALTER FUNCTION pollux.instructions(p_cluster text, p_job bigint, p_attempt integer) OWNER TO pollux_daemon;
CREATE FUNCTION pollux.instructions_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pollux', 'pg_temp'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
DECLARE
    known standing := authorise(p_cluster, p_job, p_attempt, p_uid, p_token);
BEGIN
    RETURN CASE WHEN known.moving OR known.leave THEN instructions(p_cluster, p_job, p_attempt)
        ELSE '{"drain": null, "resize": null}' END;
END
$$;
ALTER FUNCTION pollux.instructions_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text) OWNER TO pollux_daemon;
CREATE FUNCTION pollux.number_of(p_object jsonb, p_name text, p_low double precision, p_high double precision) RETURNS double precision
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO 'pg_catalog'
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
ALTER FUNCTION pollux.number_of(p_object jsonb, p_name text, p_low double precision, p_high double precision) OWNER TO pollux_daemon;
CREATE FUNCTION pollux.object_of(p_object jsonb, p_name text) RETURNS jsonb
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO 'pg_catalog'
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
ALTER FUNCTION pollux.object_of(p_object jsonb, p_name text) OWNER TO pollux_daemon;
CREATE FUNCTION pollux.prior_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_fingerprint text, p_gpu_type text) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pollux', 'pg_temp'
    AS $_$
DECLARE
    kind  text;
    told  fingerprint[];
BEGIN
    PERFORM authorise(p_cluster, p_job, p_attempt, p_uid, p_token);
    IF p_fingerprint IS NULL OR p_fingerprint !~ '^[0-9a-f]{16,64}$' THEN
        RAISE EXCEPTION 'fingerprint: expected 16 to 64 hexadecimal digits' USING ERRCODE = 'PX422';
    END IF;
    kind := type_name(p_gpu_type);
    told := ARRAY(SELECT f FROM fingerprint f
                  WHERE f.cluster = p_cluster AND f.job_id = p_job AND f.attempt = p_attempt ORDER BY f.id DESC);
    IF cardinality(told) >= 20 THEN
        RAISE EXCEPTION 'job % has told 20 fingerprints in attempt %', p_job, p_attempt USING ERRCODE = 'PX429';
    END IF;
    IF ((told[1]).fingerprint, (told[1]).gpu_type) IS DISTINCT FROM (p_fingerprint, kind) THEN
        INSERT INTO fingerprint (cluster, job_id, uid, attempt, fingerprint, gpu_type)
        VALUES (p_cluster, p_job, p_uid, p_attempt, p_fingerprint, kind);
    END IF;
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
$_$;
ALTER FUNCTION pollux.prior_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_fingerprint text, p_gpu_type text) OWNER TO pollux_daemon;
CREATE FUNCTION pollux.publish_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_payload jsonb) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pollux', 'pg_temp'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $_$
DECLARE
    a_minute constant integer := 120;
    known    standing := authorise(p_cluster, p_job, p_attempt, p_uid, p_token);
    now_at   constant timestamptz := clock_timestamp();
    latest   constant double precision := extract(epoch FROM now_at) + 300;
    p        constant jsonb := jsonb_strip_nulls(p_payload);
    stamps   constant jsonb := coalesce(nullif(p_payload -> 'times', 'null'), '{}');
    wakes    constant boolean :=
        jsonb_build_array(p -> 'times' -> 'first_step_at', coalesce(p -> 'resized', '0'), p -> 'resize_refused' -> 'id')
        <> CASE WHEN known.attempt = p_attempt THEN known.news ELSE '[null, 0, null]' END;
    stored   boolean := false;
    fresh    report_history;
BEGIN
    -- Where the former report is older, even all sessions that a user may have cannot report much oftener than this.
    IF known.received_at > now_at - interval '5 seconds' AND (
        SELECT h.received_at FROM report_history h WHERE h.cluster = p_cluster AND h.job_id = p_job
        ORDER BY h.attempt DESC, h.id DESC OFFSET a_minute - 1 LIMIT 1) > now_at - interval '1 minute' THEN
        RAISE EXCEPTION 'job % reports too often: at most % reports a minute', p_job, a_minute USING ERRCODE = 'PX429';
    END IF;
    BEGIN
        INSERT INTO report_history OVERRIDING SYSTEM VALUE
        SELECT nextval('report_history_id_seq'), p_cluster, p_job, p_attempt, p_uid, to_timestamp(s.at), now_at,
            f.alpha_grad, f.beta_grad, f.alpha_local, f.beta_local, f.alpha_node, f.beta_node, f.gamma,
            f.alpha_rack, f.beta_rack, n.sqr, n.var, l.initial, l.maximum, l.local_min, l.local_max,
            s.explored_gpus, s.explored_nodes, s.measured_gpus, s.measured_nodes,
            coalesce(s.prior_gpus, 0), coalesce(s.prior_nodes, 0), coalesce(s.prior_refuted, false),
            coalesce(s.gpu_type, ''), s.gpus, s.nodes, s.batch_size, s.local_batch, s.accumulation,
            s.goodput, s.throughput, s.data_wait, s.progress, s.target, s.epoch, s.lr_factor, s.gain,
            s.optimizer_steps, s.checkpointed, stamps, s.restart_cost, s.mode, NULL, s.resize, coalesce(s.resized, 0),
            NULL, s.resize_cost, wakes
        FROM jsonb_to_record(p) AS s(
                at double precision, explored_gpus double precision, explored_nodes double precision,
                measured_gpus double precision, measured_nodes double precision, prior_gpus double precision,
                prior_nodes double precision, prior_refuted boolean, gpu_type text, gpus double precision,
                nodes double precision, batch_size double precision, local_batch double precision,
                accumulation double precision, goodput double precision, throughput double precision,
                data_wait double precision, progress double precision, target double precision, epoch double precision,
                lr_factor double precision, gain double precision, optimizer_steps double precision, checkpointed boolean,
                restart_cost double precision, mode text, resize text, resized double precision,
                resize_cost double precision),
            jsonb_to_record(p -> 'params') AS f(
                alpha_grad double precision, beta_grad double precision, alpha_local double precision,
                beta_local double precision, alpha_node double precision, beta_node double precision,
                gamma double precision, alpha_rack double precision, beta_rack double precision),
            jsonb_to_record(p -> 'noise') AS n(sqr double precision, var double precision),
            jsonb_to_record(p -> 'limits') AS l(
                initial double precision, maximum double precision, local_min double precision, local_max double precision)
        -- The bounds are report_of's. A comparison with a member that is missing, and may not be, is NULL.
        WHERE jsonb_typeof(p_payload) = 'object' AND pg_column_size(p_payload) <= 16384 AND p -> 'v' = '1'
          AND NOT p ?| ARRAY['advice', 'resize_refused']
          -- jsonb_to_record reads the text "1" as the number 1, and the number 1 as true.
          AND NOT jsonb_path_exists(p - ARRAY['gpu_type', 'mode', 'resize'], 'strict $.** ? (@.type() == "string")')
          AND jsonb_typeof(p -> 'gpu_type') = 'string' IS NOT FALSE AND jsonb_typeof(p -> 'checkpointed') = 'boolean'
          AND jsonb_typeof(p -> 'prior_refuted') = 'boolean' IS NOT FALSE
          AND num_nulls(s.at, s.explored_gpus, s.explored_nodes, s.gpus, s.nodes, s.batch_size, s.local_batch, s.accumulation,
                s.goodput, s.throughput, s.progress, s.epoch, s.lr_factor, s.gain, s.optimizer_steps) = 0
          AND least(s.at, f.alpha_grad, f.beta_grad, f.alpha_local, f.beta_local, f.alpha_node, f.beta_node, f.alpha_rack,
                f.beta_rack, n.sqr, n.var, s.explored_gpus, s.explored_nodes, s.measured_gpus, s.measured_nodes,
                s.prior_gpus, s.prior_nodes, s.gpus, s.nodes, s.batch_size, s.local_batch, s.accumulation, s.goodput,
                s.throughput, s.data_wait, s.progress, s.target, s.epoch, s.lr_factor, s.gain, s.optimizer_steps,
                s.restart_cost, s.resized, s.resize_cost) >= 0
          AND s.at <= latest
          AND greatest(f.alpha_grad, f.beta_grad, f.alpha_local, f.beta_local, f.alpha_node, f.beta_node, f.alpha_rack,
                f.beta_rack, s.goodput, s.throughput, s.epoch, s.lr_factor, s.gain) <= 1e12
          AND greatest(s.explored_gpus, s.explored_nodes, s.measured_gpus, s.measured_nodes, s.prior_gpus, s.prior_nodes,
                s.gpus, s.nodes) <= 1e6
          AND greatest(s.batch_size, s.local_batch, s.accumulation, l.maximum, l.local_max) <= 2147483647
          AND greatest(s.progress, s.target, s.optimizer_steps) <= 1e15
          AND greatest(s.restart_cost, s.resize_cost, 0) <= 1e9
          AND greatest(n.sqr, n.var, 0) <= 1e300 AND greatest(s.resized, 0) <= 9e15 AND greatest(s.data_wait, 0) <= 1
          AND num_nulls(f.alpha_grad, f.beta_grad, f.alpha_local, f.beta_local, f.alpha_node, f.beta_node, f.gamma)
                = CASE WHEN p ? 'params' THEN 0 ELSE 7 END
          AND num_nulls(f.alpha_rack, f.beta_rack) <> 1 AND f.gamma BETWEEN 1 AND 10 IS NOT FALSE
          AND num_nulls(n.sqr, n.var) = CASE WHEN p ? 'noise' THEN 0 ELSE 2 END
          AND l.initial >= 1 AND l.maximum >= l.initial::integer AND l.local_min >= 1 AND l.local_max >= l.local_min::integer
          AND coalesce(length(s.gpu_type) <= 64 AND s.gpu_type !~ '[^[:print:]]', true)
          AND s.mode IN ('observe', 'advise', 'enforce') IS NOT FALSE
          AND s.resize IN ('in-place', 'relaunch', 'requeue') IS NOT FALSE
          AND jsonb_array_length(jsonb_path_query_array(stamps, 'strict $.*')) <= 16
          AND NOT jsonb_path_exists(stamps, 'strict $.* ? (@.type() != "null" &&
                (@.type() != "number" || @ < 1 || @ > $latest))', jsonb_build_object('latest', latest));
        stored := FOUND;
    EXCEPTION WHEN data_exception THEN
        NULL;  -- a member of another type, or a number out of range: report_of names it
    END;
    IF NOT stored THEN
        fresh := report_of(p_payload);
        fresh.id := nextval('report_history_id_seq');
        fresh.cluster := p_cluster;
        fresh.job_id := p_job;
        fresh.attempt := p_attempt;
        fresh.uid := p_uid;
        fresh.received_at := now_at;
        fresh.wakes := wakes;
        INSERT INTO report_history OVERRIDING SYSTEM VALUE SELECT (fresh).*;
    END IF;
    IF wakes THEN
        PERFORM pg_notify('pollux', '');
    ELSE
        -- A server that crashes within the next second loses the report. The next report stands for it.
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    RETURN CASE WHEN known.moving OR known.leave THEN instructions(p_cluster, p_job, p_attempt)
        ELSE '{"drain": null, "resize": null}' END;
END
$_$;
ALTER FUNCTION pollux.publish_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_payload jsonb) OWNER TO pollux_daemon;
CREATE TABLE pollux.report_history (
    id bigint NOT NULL,
    cluster pollux.cluster_name NOT NULL,
    job_id bigint NOT NULL,
    attempt integer NOT NULL,
    uid bigint NOT NULL,
    at timestamp with time zone NOT NULL,
    received_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    alpha_grad pollux.amount,
    beta_grad pollux.amount,
    alpha_local pollux.amount,
    beta_local pollux.amount,
    alpha_node pollux.amount,
    beta_node pollux.amount,
    gamma pollux.amount,
    alpha_rack pollux.amount,
    beta_rack pollux.amount,
    noise_sqr pollux.amount,
    noise_var pollux.amount,
    batch_initial integer NOT NULL,
    batch_maximum integer NOT NULL,
    local_min integer NOT NULL,
    local_max integer NOT NULL,
    explored_gpus integer NOT NULL,
    explored_nodes integer NOT NULL,
    measured_gpus integer,
    measured_nodes integer,
    prior_gpus integer NOT NULL,
    prior_nodes integer NOT NULL,
    prior_refuted boolean NOT NULL,
    gpu_type text NOT NULL,
    gpus integer NOT NULL,
    nodes integer NOT NULL,
    batch_size integer NOT NULL,
    local_batch integer NOT NULL,
    accumulation integer NOT NULL,
    goodput pollux.amount NOT NULL,
    throughput pollux.amount NOT NULL,
    data_wait pollux.amount,
    progress pollux.amount NOT NULL,
    target pollux.amount,
    epoch pollux.amount NOT NULL,
    lr_factor pollux.amount NOT NULL,
    gain pollux.amount NOT NULL,
    optimizer_steps bigint NOT NULL,
    checkpointed boolean NOT NULL,
    times jsonb NOT NULL,
    restart_cost pollux.amount,
    mode text,
    advice jsonb,
    resize text,
    resized bigint NOT NULL,
    resize_refused jsonb,
    resize_cost pollux.amount,
    wakes boolean DEFAULT false NOT NULL
);
ALTER TABLE pollux.report_history OWNER TO pollux_daemon;
COMMENT ON TABLE pollux.report_history IS 'every report; thinned to one a minute after a day';
COMMENT ON COLUMN pollux.report_history.measured_gpus IS 'most GPUs measured on gpu_type; explored_gpus counts every type';
COMMENT ON COLUMN pollux.report_history.prior_gpus IS 'most GPUs that the fit takes from earlier runs; 0: none';
COMMENT ON COLUMN pollux.report_history.data_wait IS 'share of the training time spent waiting for the data loader';
COMMENT ON COLUMN pollux.report_history.mode IS 'what the agent may change; NULL: not told';
COMMENT ON COLUMN pollux.report_history.advice IS 'in mode advise: batch_size, local_batch, accumulation, and goodput_ratio over the batch size in use';
COMMENT ON COLUMN pollux.report_history.resize IS 'the fastest way to change the job''s size; NULL: requeue';
COMMENT ON COLUMN pollux.report_history.resized IS 'newest resize or relaunch in effect (move.id); 0: none in this attempt';
COMMENT ON COLUMN pollux.report_history.resize_refused IS '{"id", "why"}: a move that the agent could not carry out';
COMMENT ON COLUMN pollux.report_history.resize_cost IS 'seconds between the optimizer steps before and after the newest resize';
COMMENT ON COLUMN pollux.report_history.wakes IS 'a first step, a resize or a refusal: polluxd looks at once';
CREATE FUNCTION pollux.report_of(p_payload jsonb) RETURNS pollux.report_history
    LANGUAGE plpgsql STABLE
    SET search_path TO 'pg_catalog', 'pollux', 'pg_temp'
    AS $$
DECLARE
    big      constant double precision := 1e12;
    whole    constant double precision := 2147483647;
    params   jsonb;
    noise    jsonb;
    limits   jsonb;
    advice   jsonb;
    refusal  jsonb;
    decoded  report_history;
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
        IF num_nulls(decoded.alpha_rack, decoded.beta_rack) = 1 THEN
            RAISE EXCEPTION 'report: expected alpha_rack and beta_rack, or none of them' USING ERRCODE = 'PX422';
        END IF;
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
ALTER FUNCTION pollux.report_of(p_payload jsonb) OWNER TO pollux_daemon;
CREATE FUNCTION pollux.required_number(p_object jsonb, p_name text, p_low double precision, p_high double precision) RETURNS double precision
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO 'pg_catalog', 'pollux', 'pg_temp'
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
ALTER FUNCTION pollux.required_number(p_object jsonb, p_name text, p_low double precision, p_high double precision) OWNER TO pollux_daemon;
CREATE FUNCTION pollux.stamps_of(p_object jsonb, p_name text) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path TO 'pg_catalog', 'pollux', 'pg_temp'
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
ALTER FUNCTION pollux.stamps_of(p_object jsonb, p_name text) OWNER TO pollux_daemon;
CREATE FUNCTION pollux.step_rank(step text) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT
    SET search_path TO 'pg_catalog'
    AS $$
    SELECT array_position(
        ARRAY['planned', 'draining', 'recruiting', 'checkpointed', 'requeued', 'configured', 'started',
              'training', 'parked', 'failed'], step)
$$;
ALTER FUNCTION pollux.step_rank(step text) OWNER TO pollux_daemon;
CREATE FUNCTION pollux.type_name(p_value text) RETURNS text
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO 'pg_catalog'
    AS $$
BEGIN
    IF length(p_value) > 64 OR p_value ~ '[^[:print:]]' THEN
        RAISE EXCEPTION 'gpu_type: expected at most 64 printable characters' USING ERRCODE = 'PX422';
    END IF;
    RETURN coalesce(p_value, '');
END
$$;
ALTER FUNCTION pollux.type_name(p_value text) OWNER TO pollux_daemon;
CREATE FUNCTION pollux_roles.admit(p_role text, p_password text, p_connections integer) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET lock_timeout TO '500ms'
    SET log_min_error_statement TO 'panic'
    AS $_$
DECLARE
    setting   text;
    database  name;
    found_oid oid := (SELECT r.oid FROM pg_authid r WHERE r.rolname = p_role);
BEGIN
    IF p_role !~ '^pollux_.{1,40}_[0-9]{1,10}_[0-9a-f]{4}$' OR octet_length(p_role) > 63 THEN
        RAISE EXCEPTION 'role %: not the name of an agents'' role', p_role USING ERRCODE = 'PX422';
    END IF;
    IF found_oid IS NULL THEN
        EXECUTE format('CREATE ROLE %I LOGIN IN ROLE pollux_agent', p_role);
        DELETE FROM pollux_roles.agent a WHERE a.role = p_role;
    ELSIF NOT EXISTS (SELECT FROM pollux_roles.agent a WHERE a.role = p_role) THEN
        RAISE EXCEPTION 'role % exists, and polluxd did not make it: drop or rename it', p_role USING ERRCODE = 'PX409';
    ELSIF EXISTS (
        SELECT FROM pg_authid r JOIN pollux_roles.agent a ON a.role = r.rolname
        WHERE r.oid = found_oid AND r.rolpassword = a.verifier
          AND a.settings = (SELECT s.setconfig FROM pg_db_role_setting s WHERE s.setrole = r.oid AND s.setdatabase = 0)
          AND NOT EXISTS (SELECT FROM pg_db_role_setting s WHERE s.setrole = r.oid AND s.setdatabase <> 0))
    THEN
        IF (SELECT r.rolconnlimit FROM pg_authid r WHERE r.oid = found_oid) <> p_connections THEN
            EXECUTE format('ALTER ROLE %I CONNECTION LIMIT %s', p_role, p_connections);
        END IF;
        RETURN false;
    ELSE
        -- Sessions keep what the user has set, and an open transaction may hold the role's row.
        PERFORM pg_terminate_backend(s.pid) FROM pg_stat_activity s WHERE s.usesysid = found_oid;
    END IF;
    EXECUTE format('ALTER ROLE %I LOGIN CONNECTION LIMIT %s PASSWORD %L', p_role, p_connections, p_password);
    FOR database IN
        SELECT d.datname FROM pg_db_role_setting s JOIN pg_database d ON d.oid = s.setdatabase
        WHERE s.setrole = (SELECT r.oid FROM pg_authid r WHERE r.rolname = p_role)
    LOOP
        EXECUTE format('ALTER ROLE %I IN DATABASE %I RESET ALL', p_role, database);
    END LOOP;
    EXECUTE format('ALTER ROLE %I RESET ALL', p_role);
    -- The first four can be changed by a superuser only. They keep temporary files off the disk, and tokens and errors
    -- out of the server's log. The others are a convenience: end_sessions holds where a user has changed them.
    FOREACH setting IN ARRAY ARRAY[
        'temp_file_limit = ''1MB''', 'log_min_messages = panic', 'log_min_error_statement = panic',
        'log_min_duration_statement = -1', 'statement_timeout = ''5s''', 'lock_timeout = ''1s''',
        'idle_in_transaction_session_timeout = ''5s''', 'search_path = pg_catalog', 'jit = off'
    ] LOOP
        EXECUTE format('ALTER ROLE %I SET %s', p_role, setting);
    END LOOP;
    INSERT INTO pollux_roles.agent
    SELECT r.rolname, r.rolpassword, s.setconfig
    FROM pg_authid r JOIN pg_db_role_setting s ON s.setrole = r.oid WHERE r.rolname = p_role
    ON CONFLICT (role) DO UPDATE SET verifier = excluded.verifier, settings = excluded.settings;
    RETURN true;
END
$_$;
ALTER FUNCTION pollux_roles.admit(p_role text, p_password text, p_connections integer) OWNER TO postgres;
CREATE FUNCTION pollux_roles.dismiss(p_role text) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET lock_timeout TO '500ms'
    AS $$
BEGIN
    DELETE FROM pollux_roles.agent a WHERE a.role = p_role;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF EXISTS (SELECT FROM pg_roles r WHERE r.rolname = p_role) THEN
        PERFORM pg_terminate_backend(s.pid) FROM pg_stat_activity s WHERE s.usename = p_role;
        EXECUTE format('DROP OWNED BY %I', p_role);
        EXECUTE format('DROP ROLE %I', p_role);
    END IF;
    RETURN true;
END
$$;
ALTER FUNCTION pollux_roles.dismiss(p_role text) OWNER TO postgres;
CREATE FUNCTION pollux_roles.end_sessions(p_seconds double precision) RETURNS TABLE(role name, ended bigint)
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    SELECT s.usename, count(*) FILTER (WHERE pg_terminate_backend(s.pid))
    FROM pg_stat_activity s JOIN pollux_roles.agent a ON a.role = s.usename
    WHERE s.xact_start < clock_timestamp() - make_interval(secs => p_seconds)
    GROUP BY s.usename
$$;
ALTER FUNCTION pollux_roles.end_sessions(p_seconds double precision) OWNER TO postgres;
CREATE TABLE pollux.acknowledgement (
    id bigint NOT NULL,
    cluster pollux.cluster_name NOT NULL,
    job_id bigint NOT NULL,
    attempt integer NOT NULL,
    move_id bigint NOT NULL,
    received_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    facts jsonb NOT NULL
);
ALTER TABLE pollux.acknowledgement OWNER TO pollux_daemon;
COMMENT ON TABLE pollux.acknowledgement IS 'agents tell that the checkpoint which a move asked for is durable';
ALTER TABLE pollux.acknowledgement ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME pollux.acknowledgement_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE pollux.agent_role (
    role name NOT NULL,
    cluster pollux.cluster_name NOT NULL,
    uid bigint NOT NULL,
    secret_id bigint NOT NULL,
    connections integer NOT NULL,
    leave boolean NOT NULL,
    wanted_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT agent_role_connections_check CHECK ((connections > 0))
);
ALTER TABLE pollux.agent_role OWNER TO pollux_daemon;
COMMENT ON COLUMN pollux.agent_role.leave IS 'connections are scarce: an agent disconnects after each exchange';
COMMENT ON COLUMN pollux.agent_role.wanted_at IS 'when the user last had a job';
CREATE TABLE pollux.allocation (
    cycle_id bigint NOT NULL,
    job_id bigint NOT NULL,
    nodes text[] NOT NULL,
    gpus_per_node integer NOT NULL,
    gpus integer NOT NULL,
    goodput pollux.amount,
    speedup pollux.amount,
    batch_size integer NOT NULL,
    changed boolean NOT NULL,
    reason text NOT NULL,
    explanation jsonb,
    until bigint,
    CONSTRAINT allocation_batch_size_check CHECK ((batch_size >= 0)),
    CONSTRAINT allocation_check CHECK ((gpus = (cardinality(nodes) * gpus_per_node))),
    CONSTRAINT allocation_gpus_check CHECK ((gpus >= 0)),
    CONSTRAINT allocation_gpus_per_node_check CHECK ((gpus_per_node >= 0))
);
ALTER TABLE pollux.allocation OWNER TO pollux_daemon;
COMMENT ON COLUMN pollux.allocation.until IS 'the first cycle for which it does not hold any more; null: it holds';
CREATE TABLE pollux.cycle (
    id bigint NOT NULL,
    cluster pollux.cluster_name NOT NULL,
    epoch bigint,
    mode text NOT NULL,
    started_at timestamp with time zone NOT NULL,
    note text DEFAULT ''::text NOT NULL,
    objective pollux.finite,
    upper_bound pollux.finite,
    gap pollux.amount,
    solver text,
    durations jsonb DEFAULT '{}'::jsonb NOT NULL,
    snapshot jsonb,
    plan_digest text,
    CONSTRAINT cycle_mode_check CHECK ((mode = ANY (ARRAY['observe'::text, 'advise'::text, 'enforce'::text])))
);
ALTER TABLE pollux.cycle OWNER TO pollux_daemon;
COMMENT ON COLUMN pollux.cycle.solver IS 'NULL: this cycle made no decision; note says why';
COMMENT ON COLUMN pollux.cycle.plan_digest IS 'SHA-256 of all decisions of the cycle, the unchanged ones included';
ALTER TABLE pollux.cycle ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME pollux.cycle_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE pollux.fingerprint (
    id bigint NOT NULL,
    cluster pollux.cluster_name NOT NULL,
    job_id bigint NOT NULL,
    uid bigint NOT NULL,
    attempt integer NOT NULL,
    received_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    fingerprint text NOT NULL,
    gpu_type text NOT NULL,
    CONSTRAINT fingerprint_fingerprint_check CHECK ((fingerprint ~ '^[0-9a-f]{16,64}$'::text))
);
ALTER TABLE pollux.fingerprint OWNER TO pollux_daemon;
ALTER TABLE pollux.fingerprint ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME pollux.fingerprint_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE pollux.job (
    cluster pollux.cluster_name NOT NULL,
    job_id bigint NOT NULL,
    uid bigint NOT NULL,
    name text DEFAULT ''::text NOT NULL,
    user_name text DEFAULT ''::text NOT NULL,
    account text DEFAULT ''::text NOT NULL,
    partition text DEFAULT ''::text NOT NULL,
    spec jsonb NOT NULL,
    state text NOT NULL,
    slurm_state text DEFAULT ''::text NOT NULL,
    slurm_reason text DEFAULT ''::text NOT NULL,
    attempt integer DEFAULT 0 NOT NULL,
    nodes text[] DEFAULT '{}'::text[] NOT NULL,
    gpus integer DEFAULT 0 NOT NULL,
    submitted_at timestamp with time zone NOT NULL,
    started_at timestamp with time zone,
    ended_at timestamp with time zone,
    seen_at timestamp with time zone DEFAULT now() NOT NULL,
    held_at timestamp with time zone,
    most_gpus integer DEFAULT 0 NOT NULL,
    most_nodes integer DEFAULT 0 NOT NULL,
    pinned_by text,
    CONSTRAINT job_attempt_check CHECK ((attempt >= 0)),
    CONSTRAINT job_gpus_check CHECK ((gpus >= 0)),
    CONSTRAINT job_job_id_check CHECK ((job_id > 0)),
    CONSTRAINT job_most_gpus_check CHECK ((most_gpus >= 0)),
    CONSTRAINT job_most_nodes_check CHECK ((most_nodes >= 0)),
    CONSTRAINT job_state_check CHECK ((state = ANY (ARRAY['PENDING'::text, 'RUNNING'::text, 'COMPLETING'::text, 'SUSPENDED'::text, 'COMPLETED'::text, 'FAILED'::text, 'CANCELLED'::text, 'GONE'::text]))),
    CONSTRAINT job_uid_check CHECK ((uid >= 0))
);
ALTER TABLE pollux.job OWNER TO pollux_daemon;
COMMENT ON COLUMN pollux.job.state IS 'GONE: Slurm forgot the job before polluxd saw its end';
COMMENT ON COLUMN pollux.job.submitted_at IS 'first submission; Slurm resets its own at a requeue';
COMMENT ON COLUMN pollux.job.held_at IS 'when the job was last seen to hold GPUs';
COMMENT ON COLUMN pollux.job.most_gpus IS 'most GPUs that the job has held; it cannot have measured more';
COMMENT ON COLUMN pollux.job.pinned_by IS 'who pinned the job (polluxctl pin); its GPUs stay as they are';
CREATE TABLE pollux.leader (
    cluster pollux.cluster_name NOT NULL,
    epoch bigint NOT NULL,
    holder text NOT NULL,
    since timestamp with time zone DEFAULT now() NOT NULL,
    lease_until timestamp with time zone NOT NULL,
    CONSTRAINT leader_epoch_check CHECK ((epoch > 0))
);
ALTER TABLE pollux.leader OWNER TO pollux_daemon;
CREATE TABLE pollux.move (
    id bigint NOT NULL,
    cluster pollux.cluster_name NOT NULL,
    job_id bigint NOT NULL,
    attempt integer NOT NULL,
    path text NOT NULL,
    source jsonb NOT NULL,
    target jsonb NOT NULL,
    reason text NOT NULL,
    step text NOT NULL,
    times jsonb NOT NULL,
    detail text DEFAULT ''::text NOT NULL,
    epoch bigint NOT NULL,
    acknowledged jsonb,
    resumed jsonb,
    cancelled_by text,
    ends_at timestamp with time zone,
    nonce text DEFAULT replace((gen_random_uuid())::text, '-'::text, ''::text) NOT NULL,
    CONSTRAINT move_attempt_check CHECK ((attempt >= 0)),
    CONSTRAINT move_job_id_check CHECK ((job_id > 0)),
    CONSTRAINT move_nonce_check CHECK ((nonce ~ '^([0-9a-f]{32})?$'::text)),
    CONSTRAINT move_path_check CHECK ((path = ANY (ARRAY['start'::text, 'requeue'::text, 'park'::text, 'relaunch'::text, 'resize'::text]))),
    CONSTRAINT move_step_check CHECK ((pollux.step_rank(step) IS NOT NULL))
);
ALTER TABLE pollux.move OWNER TO pollux_daemon;
COMMENT ON TABLE pollux.move IS 'moves of jobs between placements; each step is written before its action on Slurm';
COMMENT ON COLUMN pollux.move.times IS '{step: POSIX time at which the move reached it}';
COMMENT ON COLUMN pollux.move.acknowledged IS 'what the old attempt said of its last step and checkpoint';
COMMENT ON COLUMN pollux.move.resumed IS 'times of the new attempt: launched_at .. first_step_at';
COMMENT ON COLUMN pollux.move.cancelled_by IS 'who cancelled the move; in force until the job is requeued';
COMMENT ON COLUMN pollux.move.ends_at IS 'when the draining attempt would have reached its time limit';
COMMENT ON COLUMN pollux.move.nonce IS 'random; told to the job''s agent with the order to grow; its companion job states it';
ALTER TABLE pollux.move ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME pollux.move_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE pollux.prior (
    cluster pollux.cluster_name NOT NULL,
    uid bigint NOT NULL,
    fingerprint text NOT NULL,
    gpu_type text NOT NULL,
    job_id bigint NOT NULL,
    at timestamp with time zone NOT NULL,
    alpha_grad pollux.amount NOT NULL,
    beta_grad pollux.amount NOT NULL,
    alpha_local pollux.amount NOT NULL,
    beta_local pollux.amount NOT NULL,
    alpha_node pollux.amount NOT NULL,
    beta_node pollux.amount NOT NULL,
    gamma pollux.amount NOT NULL,
    alpha_rack pollux.amount,
    beta_rack pollux.amount,
    explored_gpus integer NOT NULL,
    explored_nodes integer NOT NULL,
    refutes boolean DEFAULT false NOT NULL,
    CONSTRAINT prior_explored_gpus_check CHECK ((explored_gpus >= 0)),
    CONSTRAINT prior_explored_nodes_check CHECK ((explored_nodes >= 0)),
    CONSTRAINT prior_fingerprint_check CHECK ((fingerprint ~ '^[0-9a-f]{16,64}$'::text)),
    CONSTRAINT prior_gamma_check CHECK ((((gamma)::double precision >= (1)::double precision) AND ((gamma)::double precision <= (10)::double precision)))
);
ALTER TABLE pollux.prior OWNER TO pollux_daemon;
COMMENT ON COLUMN pollux.prior.job_id IS 'the last job that measured it';
COMMENT ON COLUMN pollux.prior.refutes IS 'this run had measured that the fit before it was wrong';
CREATE VIEW pollux.report AS
 SELECT DISTINCT ON (report_history.cluster, report_history.job_id) report_history.id,
    report_history.cluster,
    report_history.job_id,
    report_history.attempt,
    report_history.uid,
    report_history.at,
    report_history.received_at,
    report_history.alpha_grad,
    report_history.beta_grad,
    report_history.alpha_local,
    report_history.beta_local,
    report_history.alpha_node,
    report_history.beta_node,
    report_history.gamma,
    report_history.alpha_rack,
    report_history.beta_rack,
    report_history.noise_sqr,
    report_history.noise_var,
    report_history.batch_initial,
    report_history.batch_maximum,
    report_history.local_min,
    report_history.local_max,
    report_history.explored_gpus,
    report_history.explored_nodes,
    report_history.measured_gpus,
    report_history.measured_nodes,
    report_history.prior_gpus,
    report_history.prior_nodes,
    report_history.prior_refuted,
    report_history.gpu_type,
    report_history.gpus,
    report_history.nodes,
    report_history.batch_size,
    report_history.local_batch,
    report_history.accumulation,
    report_history.goodput,
    report_history.throughput,
    report_history.data_wait,
    report_history.progress,
    report_history.target,
    report_history.epoch,
    report_history.lr_factor,
    report_history.gain,
    report_history.optimizer_steps,
    report_history.checkpointed,
    report_history.times,
    report_history.restart_cost,
    report_history.mode,
    report_history.advice,
    report_history.resize,
    report_history.resized,
    report_history.resize_refused,
    report_history.resize_cost,
    report_history.wakes
   FROM pollux.report_history
  ORDER BY report_history.cluster, report_history.job_id, report_history.attempt DESC, report_history.id DESC;
ALTER TABLE pollux.report OWNER TO pollux_daemon;
COMMENT ON VIEW pollux.report IS 'the latest report of each job; quick for one job';
ALTER TABLE pollux.report_history ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME pollux.report_history_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE pollux.schema_migration (
    name text NOT NULL,
    checksum text NOT NULL,
    applied_at timestamp with time zone DEFAULT now() NOT NULL
);
ALTER TABLE pollux.schema_migration OWNER TO pollux_daemon;
CREATE TABLE pollux.secret (
    id bigint NOT NULL,
    cluster pollux.cluster_name NOT NULL,
    key bytea NOT NULL,
    installed_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT secret_key_check CHECK ((length(key) >= 16))
);
ALTER TABLE pollux.secret OWNER TO pollux_daemon;
ALTER TABLE pollux.secret ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME pollux.secret_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE pollux.setting (
    cluster pollux.cluster_name NOT NULL,
    name text NOT NULL,
    value jsonb NOT NULL,
    CONSTRAINT setting_name CHECK ((name ~ '^[a-z][a-z_]{0,62}$'::text)),
    CONSTRAINT setting_value CHECK ((jsonb_typeof(value) <> 'array'::text))
);
ALTER TABLE pollux.setting OWNER TO pollux_daemon;
CREATE TABLE pollux.setting_audit (
    id bigint NOT NULL,
    cluster pollux.cluster_name NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    who text NOT NULL,
    name text NOT NULL,
    from_value jsonb,
    to_value jsonb
);
ALTER TABLE pollux.setting_audit OWNER TO pollux_daemon;
ALTER TABLE pollux.setting_audit ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME pollux.setting_audit_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE pollux_roles.agent (
    role name NOT NULL,
    verifier text NOT NULL,
    settings text[] NOT NULL
);
ALTER TABLE pollux_roles.agent OWNER TO postgres;
COMMENT ON TABLE pollux_roles.agent IS 'agents'' roles as they were made: their users may change them (ALTER ROLE)';
ALTER TABLE ONLY pollux.acknowledgement
    ADD CONSTRAINT acknowledgement_pkey PRIMARY KEY (id);
ALTER TABLE ONLY pollux.agent_role
    ADD CONSTRAINT agent_role_pkey PRIMARY KEY (role);
ALTER TABLE ONLY pollux.allocation
    ADD CONSTRAINT allocation_pkey PRIMARY KEY (cycle_id, job_id);
ALTER TABLE ONLY pollux.cycle
    ADD CONSTRAINT cycle_pkey PRIMARY KEY (id);
ALTER TABLE ONLY pollux.fingerprint
    ADD CONSTRAINT fingerprint_pkey PRIMARY KEY (id);
ALTER TABLE ONLY pollux.job
    ADD CONSTRAINT job_pkey PRIMARY KEY (cluster, job_id);
ALTER TABLE ONLY pollux.leader
    ADD CONSTRAINT leader_pkey PRIMARY KEY (cluster);
ALTER TABLE ONLY pollux.move
    ADD CONSTRAINT move_pkey PRIMARY KEY (id);
ALTER TABLE ONLY pollux.prior
    ADD CONSTRAINT prior_pkey PRIMARY KEY (cluster, uid, fingerprint, gpu_type);
ALTER TABLE ONLY pollux.report_history
    ADD CONSTRAINT report_history_pkey PRIMARY KEY (id);
ALTER TABLE ONLY pollux.schema_migration
    ADD CONSTRAINT schema_migration_pkey PRIMARY KEY (name);
ALTER TABLE ONLY pollux.secret
    ADD CONSTRAINT secret_cluster_key_key UNIQUE (cluster, key);
ALTER TABLE ONLY pollux.secret
    ADD CONSTRAINT secret_pkey PRIMARY KEY (id);
ALTER TABLE ONLY pollux.setting_audit
    ADD CONSTRAINT setting_audit_pkey PRIMARY KEY (id);
ALTER TABLE ONLY pollux.setting
    ADD CONSTRAINT setting_pkey PRIMARY KEY (cluster, name);
ALTER TABLE ONLY pollux_roles.agent
    ADD CONSTRAINT agent_pkey PRIMARY KEY (role);
CREATE INDEX acknowledgement_by_move ON pollux.acknowledgement USING btree (move_id);
CREATE INDEX allocation_by_job ON pollux.allocation USING btree (job_id, cycle_id);
CREATE INDEX allocation_until ON pollux.allocation USING btree (until, cycle_id);
CREATE INDEX cycle_by_time ON pollux.cycle USING btree (cluster, started_at);
CREATE INDEX fingerprint_by_job ON pollux.fingerprint USING btree (cluster, job_id, attempt DESC, id DESC);
CREATE INDEX job_active ON pollux.job USING btree (cluster) WHERE (ended_at IS NULL);
CREATE INDEX move_broken ON pollux.move USING btree (cluster, job_id) WHERE ((step = 'failed'::text) AND (path = ANY (ARRAY['resize'::text, 'relaunch'::text])));
CREATE INDEX move_by_job ON pollux.move USING btree (cluster, job_id, id);
CREATE INDEX move_drained ON pollux.move USING btree (cluster, (((times ->> 'draining'::text))::double precision)) WHERE (times ? 'draining'::text);
CREATE UNIQUE INDEX move_one_open ON pollux.move USING btree (cluster, job_id) WHERE (step <> ALL (ARRAY['training'::text, 'parked'::text, 'failed'::text]));
CREATE INDEX report_by_time ON pollux.report_history USING brin (received_at);
CREATE INDEX report_latest ON pollux.report_history USING btree (cluster, job_id, attempt DESC, id DESC);
CREATE TRIGGER audit AFTER INSERT OR DELETE OR UPDATE ON pollux.setting FOR EACH ROW EXECUTE FUNCTION pollux.audit_setting();
CREATE TRIGGER guard BEFORE INSERT OR UPDATE ON pollux.move FOR EACH ROW EXECUTE FUNCTION pollux.guard_move();
ALTER TABLE ONLY pollux.allocation
    ADD CONSTRAINT allocation_cycle_id_fkey FOREIGN KEY (cycle_id) REFERENCES pollux.cycle(id) ON DELETE CASCADE;
GRANT USAGE ON SCHEMA pollux TO pollux_agent;
GRANT USAGE ON SCHEMA pollux TO pollux_read;
GRANT USAGE ON SCHEMA pollux_roles TO pollux_daemon;
REVOKE USAGE ON SCHEMA public FROM PUBLIC;
GRANT USAGE ON SCHEMA public TO pollux_daemon;
REVOKE ALL ON LANGUAGE plpgsql FROM PUBLIC;
GRANT ALL ON LANGUAGE plpgsql TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.lo_close(integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.lo_close(integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.lo_creat(integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.lo_creat(integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.lo_create(oid) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.lo_create(oid) TO pollux_daemon;
GRANT ALL ON FUNCTION pg_catalog.lo_export(oid, text) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.lo_from_bytea(oid, bytea) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.lo_from_bytea(oid, bytea) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.lo_get(oid) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.lo_get(oid) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.lo_get(oid, bigint, integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.lo_get(oid, bigint, integer) TO pollux_daemon;
GRANT ALL ON FUNCTION pg_catalog.lo_import(text) TO pollux_daemon;
GRANT ALL ON FUNCTION pg_catalog.lo_import(text, oid) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.lo_lseek(integer, integer, integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.lo_lseek(integer, integer, integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.lo_lseek64(integer, bigint, integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.lo_lseek64(integer, bigint, integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.lo_open(oid, integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.lo_open(oid, integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.lo_put(oid, bigint, bytea) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.lo_put(oid, bigint, bytea) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.lo_tell(integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.lo_tell(integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.lo_tell64(integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.lo_tell64(integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.lo_truncate(integer, integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.lo_truncate(integer, integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.lo_truncate64(integer, bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.lo_truncate64(integer, bigint) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.lo_unlink(oid) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.lo_unlink(oid) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.loread(integer, integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.loread(integer, integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.lowrite(integer, bytea) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.lowrite(integer, bytea) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_advisory_lock(bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_advisory_lock(bigint) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_advisory_lock(integer, integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_advisory_lock(integer, integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_advisory_lock_shared(bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_advisory_lock_shared(bigint) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_advisory_lock_shared(integer, integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_advisory_lock_shared(integer, integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_advisory_unlock(bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_advisory_unlock(bigint) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_advisory_unlock(integer, integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_advisory_unlock(integer, integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_advisory_unlock_all() FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_advisory_unlock_all() TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_advisory_unlock_shared(bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_advisory_unlock_shared(bigint) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_advisory_unlock_shared(integer, integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_advisory_unlock_shared(integer, integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_advisory_xact_lock(bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_advisory_xact_lock(bigint) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_advisory_xact_lock(integer, integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_advisory_xact_lock(integer, integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_advisory_xact_lock_shared(bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_advisory_xact_lock_shared(bigint) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_advisory_xact_lock_shared(integer, integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_advisory_xact_lock_shared(integer, integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_cancel_backend(integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_cancel_backend(integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_export_snapshot() FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_export_snapshot() TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_logical_emit_message(boolean, text, bytea) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_logical_emit_message(boolean, text, bytea) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_logical_emit_message(boolean, text, text) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_logical_emit_message(boolean, text, text) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_terminate_backend(pid integer, timeout bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_terminate_backend(pid integer, timeout bigint) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_try_advisory_lock(bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_try_advisory_lock(bigint) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_try_advisory_lock(integer, integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_try_advisory_lock(integer, integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_try_advisory_lock_shared(bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_try_advisory_lock_shared(bigint) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_try_advisory_lock_shared(integer, integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_try_advisory_lock_shared(integer, integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_try_advisory_xact_lock(bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_try_advisory_xact_lock(bigint) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_try_advisory_xact_lock(integer, integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_try_advisory_xact_lock(integer, integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_try_advisory_xact_lock_shared(bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_try_advisory_xact_lock_shared(bigint) TO pollux_daemon;
REVOKE ALL ON FUNCTION pg_catalog.pg_try_advisory_xact_lock_shared(integer, integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pg_catalog.pg_try_advisory_xact_lock_shared(integer, integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pollux.acknowledge_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_move bigint, p_payload jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION pollux.acknowledge_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_move bigint, p_payload jsonb) TO pollux_agent;
REVOKE ALL ON FUNCTION pollux.admit_users(p_cluster text) FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux.agent_password(p_role text, p_key bytea) FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux.agent_role_name(p_cluster text, p_uid bigint, p_key bytea) FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux.audit_setting() FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux.authorise(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text) FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux.choice_of(p_object jsonb, p_name text, p_choices text[]) FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux.dismiss_users(p_cluster text) FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux.fence(p_cluster text, p_epoch bigint) FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux.guard_move() FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux.hmac_sha256(message bytea, key bytea) FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux.instructions(p_cluster text, p_job bigint, p_attempt integer) FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux.instructions_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text) FROM PUBLIC;
GRANT ALL ON FUNCTION pollux.instructions_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text) TO pollux_agent;
REVOKE ALL ON FUNCTION pollux.number_of(p_object jsonb, p_name text, p_low double precision, p_high double precision) FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux.object_of(p_object jsonb, p_name text) FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux.prior_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_fingerprint text, p_gpu_type text) FROM PUBLIC;
GRANT ALL ON FUNCTION pollux.prior_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_fingerprint text, p_gpu_type text) TO pollux_agent;
REVOKE ALL ON FUNCTION pollux.publish_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_payload jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION pollux.publish_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_payload jsonb) TO pollux_agent;
GRANT SELECT ON TABLE pollux.report_history TO pollux_read;
REVOKE ALL ON FUNCTION pollux.report_of(p_payload jsonb) FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux.required_number(p_object jsonb, p_name text, p_low double precision, p_high double precision) FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux.stamps_of(p_object jsonb, p_name text) FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux.step_rank(step text) FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux.type_name(p_value text) FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux_roles.admit(p_role text, p_password text, p_connections integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pollux_roles.admit(p_role text, p_password text, p_connections integer) TO pollux_daemon;
REVOKE ALL ON FUNCTION pollux_roles.dismiss(p_role text) FROM PUBLIC;
GRANT ALL ON FUNCTION pollux_roles.dismiss(p_role text) TO pollux_daemon;
REVOKE ALL ON FUNCTION pollux_roles.end_sessions(p_seconds double precision) FROM PUBLIC;
GRANT ALL ON FUNCTION pollux_roles.end_sessions(p_seconds double precision) TO pollux_daemon;
GRANT SELECT ON TABLE pollux.acknowledgement TO pollux_read;
GRANT SELECT ON TABLE pollux.allocation TO pollux_read;
GRANT SELECT ON TABLE pollux.cycle TO pollux_read;
GRANT SELECT ON TABLE pollux.job TO pollux_read;
GRANT SELECT ON TABLE pollux.leader TO pollux_read;
GRANT SELECT ON TABLE pollux.move TO pollux_read;
GRANT SELECT ON TABLE pollux.prior TO pollux_read;
GRANT SELECT ON TABLE pollux.report TO pollux_read;
GRANT SELECT ON TABLE pollux.schema_migration TO pollux_read;
GRANT SELECT ON TABLE pollux.setting TO pollux_read;
GRANT SELECT ON TABLE pollux.setting_audit TO pollux_read;
ALTER DEFAULT PRIVILEGES FOR ROLE pollux_daemon REVOKE ALL ON FUNCTIONS  FROM PUBLIC;
