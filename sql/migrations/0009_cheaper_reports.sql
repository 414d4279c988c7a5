-- A report costs the server half of the CPU time of before. One statement reads everything that the credentials are
-- checked against. One statement decodes, checks and stores a sound report. The table has no CHECK constraints beside
-- its columns' types, because Postgres parses each constraint again for each insert. (The types stay: sessions of agents
-- live through the migration.) publish_v1 alone inserts, and checks first; polluxd leaves out a
-- stored report that makes no sense (polluxd/store/rows.py).

DO $$
DECLARE
    former record;
BEGIN
    FOR former IN SELECT c.conname FROM pg_catalog.pg_constraint c
                  WHERE c.conrelid = 'pollux.report_history'::regclass AND c.contype = 'c' LOOP
        EXECUTE pg_catalog.format('ALTER TABLE pollux.report_history DROP CONSTRAINT %I', former.conname);
    END LOOP;
END
$$;
-- What polluxd and the inbox know of a job whose credentials were accepted.
CREATE TYPE pollux.standing AS (
    leave        boolean,
    moving       boolean,
    attempt      integer,
    received_at  timestamptz,
    news         jsonb
);
COMMENT ON COLUMN pollux.standing.moving IS 'a move of the job is under way: there may be instructions';
COMMENT ON COLUMN pollux.standing.attempt IS 'of the newest report, as received_at and news; NULL: none yet';
COMMENT ON COLUMN pollux.standing.news IS 'the parts of a report whose change wakes polluxd: first step, resize, refusal';

-- As in 0003, in one statement, and returning the job's standing.
DROP FUNCTION pollux.authorise(text, bigint, integer, bigint, text);
CREATE FUNCTION pollux.authorise(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text)
    RETURNS pollux.standing
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pollux, pg_temp
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

-- As in 0003; without a move under way there are no instructions to look for.
CREATE OR REPLACE FUNCTION pollux.instructions_v1(
    p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pollux, pg_temp
    SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    known standing := authorise(p_cluster, p_job, p_attempt, p_uid, p_token);
BEGIN
    RETURN CASE WHEN known.moving OR known.leave THEN instructions(p_cluster, p_job, p_attempt)
        ELSE '{"drain": null, "resize": null}' END;
END
$$;

-- As in 0003. A report without advice and refusal, which is nearly every one, is decoded, checked and stored by one
-- statement. report_of decides on every other report: it accepts a sound one too, and names a member that makes no sense.
CREATE OR REPLACE FUNCTION pollux.publish_v1(
    p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_payload jsonb) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pollux, pg_temp
    SET plan_cache_mode = force_generic_plan
AS $$
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
$$;
