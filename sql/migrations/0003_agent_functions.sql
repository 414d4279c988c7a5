-- What an agent may call. Every function takes the job's credentials first, and checks them first.
--
-- SQLSTATEs of our own, which polluxd and the agent know:
--   PX001 fenced: another polluxd leads      PX401 token refused            PX409 attempt over, or illegal transition
--   PX422 payload refused                    PX429 too often: report later
--   PX503 not ready (no secret, or a job that polluxd has not seen)

-- pgcrypto goes into a schema that agents cannot reach. Where a DBA has installed it elsewhere, that one is used.
CREATE SCHEMA IF NOT EXISTS pollux_crypto;
CREATE EXTENSION IF NOT EXISTS pgcrypto WITH SCHEMA pollux_crypto;
DO $$
DECLARE
    home text := (SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
                  WHERE e.extname = 'pgcrypto');
BEGIN
    -- In PL/pgSQL, which keeps its plans; a function in SQL is planned at every call.
    EXECUTE format($body$
        CREATE FUNCTION pollux.hmac_sha256(message bytea, key bytea) RETURNS bytea
            LANGUAGE plpgsql IMMUTABLE STRICT SET search_path = pg_catalog
            AS 'BEGIN RETURN %I.hmac(message, key, ''sha256''); END'
    $body$, home);
END
$$;

-- Raise unless the session's role is the user's, the job is the user's, runs, and the token is of this attempt.
-- A token is TIME.HMAC over (cluster, job, attempt, uid, TIME); TIME is when the prolog made it. A token that is older than
-- the job's submission is of an earlier job with the same id.
CREATE FUNCTION pollux.authorise(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text)
    RETURNS void
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
DECLARE
    -- Both sides are hashed with a random key, so that the time of the comparison tells nothing about the token.
    nonce     bytea := convert_to(gen_random_uuid()::text, 'UTF8');
    made_at   text := substring(p_token FROM '^([0-9]{1,12})\.[0-9a-f]{64}$');
    message   bytea := convert_to(concat_ws(':', p_cluster, p_job, p_attempt, p_uid, made_at), 'UTF8');
    given     bytea := sha256(nonce || convert_to(substring(p_token FROM '^[0-9]{1,12}\.([0-9a-f]{64})$'), 'UTF8'));
    matched   boolean := false;
    keys      integer := 0;
    candidate bytea;
    known     job;
    reported  integer;
BEGIN
    IF NOT EXISTS (SELECT FROM agent_role a
                   WHERE a.role = session_user AND a.cluster = p_cluster AND a.uid = p_uid) THEN
        RAISE EXCEPTION 'role % does not report for user % of cluster %', session_user, p_uid, p_cluster
            USING ERRCODE = 'PX401';
    END IF;
    FOR candidate IN SELECT s.key FROM secret s WHERE s.cluster = p_cluster ORDER BY s.id DESC LIMIT 2 LOOP
        keys := keys + 1;
        matched := matched OR coalesce(
            sha256(nonce || convert_to(encode(hmac_sha256(message, candidate), 'hex'), 'UTF8')) = given, false);
    END LOOP;
    IF keys = 0 THEN
        RAISE EXCEPTION 'no secret is installed for cluster %: run `polluxd migrate`', p_cluster
            USING ERRCODE = 'PX503';
    END IF;
    IF NOT matched OR p_job IS NULL OR p_attempt IS NULL THEN
        RAISE EXCEPTION 'token refused for job % attempt % of cluster %: the ticket is not of this job and attempt',
            p_job, p_attempt, p_cluster USING ERRCODE = 'PX401';
    END IF;
    SELECT * INTO known FROM job j WHERE j.cluster = p_cluster AND j.job_id = p_job;
    IF NOT FOUND THEN
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
    reported := (SELECT h.attempt FROM report_history h WHERE h.cluster = p_cluster AND h.job_id = p_job
                 ORDER BY h.attempt DESC, h.id DESC LIMIT 1);
    IF p_attempt < greatest(known.attempt, reported) THEN
        RAISE EXCEPTION 'job % is at attempt %: attempt % is over', p_job, greatest(known.attempt, reported), p_attempt
            USING ERRCODE = 'PX409';
    END IF;
    IF known.ended_at IS NOT NULL AND p_attempt <= known.attempt THEN
        RAISE EXCEPTION 'job % has ended with attempt %', p_job, p_attempt USING ERRCODE = 'PX409';
    END IF;
END
$$;

-- {"drain": move id or null} for a requeue or park; {"resize": {...} or null} for a move within the allocation;
-- {"leave": true} where the agent shall disconnect until its next report.
CREATE FUNCTION pollux.instructions(p_cluster text, p_job bigint, p_attempt integer) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, pollux, pg_temp
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
    a_minute constant integer := 120;
    fresh    report_history;
    former   report_history;
BEGIN
    PERFORM authorise(p_cluster, p_job, p_attempt, p_uid, p_token);
    fresh := report_of(p_payload);
    fresh.received_at := clock_timestamp();
    IF (SELECT h.received_at FROM report_history h WHERE h.cluster = p_cluster AND h.job_id = p_job
        ORDER BY h.attempt DESC, h.id DESC OFFSET a_minute - 1 LIMIT 1) > fresh.received_at - interval '1 minute' THEN
        RAISE EXCEPTION 'job % reports too often: at most % reports a minute', p_job, a_minute USING ERRCODE = 'PX429';
    END IF;
    SELECT * INTO former FROM report_history h
    WHERE h.cluster = p_cluster AND h.job_id = p_job AND h.attempt = p_attempt ORDER BY h.id DESC LIMIT 1;
    fresh.id := nextval('report_history_id_seq');
    fresh.cluster := p_cluster;
    fresh.job_id := p_job;
    fresh.attempt := p_attempt;
    fresh.uid := p_uid;
    fresh.wakes := coalesce(jsonb_typeof(fresh.times -> 'first_step_at'), '') = 'number'
            AND (fresh.times -> 'first_step_at') IS DISTINCT FROM (former.times -> 'first_step_at')
        OR fresh.resized <> coalesce(former.resized, 0)
        OR fresh.resize_refused -> 'id' IS DISTINCT FROM former.resize_refused -> 'id';
    INSERT INTO report_history OVERRIDING SYSTEM VALUE SELECT (fresh).*;
    IF fresh.wakes THEN
        PERFORM pg_notify('pollux', '');
    END IF;
    RETURN instructions(p_cluster, p_job, p_attempt);
END
$$;

-- Store that the checkpoint of move `p_move` is durable. True when the move counts on it, also at a repeated call (the
-- first answer was lost). False: the move is over, or was never this attempt's.
CREATE FUNCTION pollux.acknowledge_v1(
    p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text,
    p_move bigint, p_payload jsonb) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pollux, pg_temp
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

-- Tell which training this attempt runs on which GPU type, and return what the same user's earlier runs measured there:
-- null, or {"params": {...}, "explored_gpus", "explored_nodes"}. polluxd remembers the attempt's reports under the
-- fingerprint.
CREATE FUNCTION pollux.prior_v1(
    p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_fingerprint text, p_gpu_type text)
    RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
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
$$;
