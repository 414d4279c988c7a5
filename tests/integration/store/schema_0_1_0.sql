-- Schema of 0.1.0, as pg_dump shows it. Of the functions that migration 0010 drops it has the names alone.
SET ROLE pollux_daemon;
CREATE SCHEMA pollux;
CREATE SCHEMA pollux_crypto;
CREATE EXTENSION IF NOT EXISTS pgcrypto WITH SCHEMA pollux_crypto;
CREATE DOMAIN pollux.amount AS double precision
	CONSTRAINT amount_check CHECK (((VALUE >= (0)::double precision) AND (VALUE < 'Infinity'::double precision)));
CREATE DOMAIN pollux.cluster_name AS text
	CONSTRAINT cluster_name_check CHECK (((VALUE <> ''::text) AND (VALUE !~ '[:[:space:]]'::text) AND (octet_length(VALUE) <= 40)));
CREATE DOMAIN pollux.finite AS double precision
	CONSTRAINT finite_check CHECK (((VALUE > '-Infinity'::double precision) AND (VALUE < 'Infinity'::double precision)));
CREATE TYPE pollux.standing AS (
	leave boolean,
	moving boolean,
	attempt integer,
	received_at timestamp with time zone,
	news jsonb
);
CREATE FUNCTION pollux.acknowledge_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_move bigint, p_payload jsonb) RETURNS boolean LANGUAGE plpgsql AS '';
CREATE FUNCTION pollux.admit_users(p_cluster text) RETURNS TABLE(admitted text, trouble text) LANGUAGE plpgsql AS '';
CREATE FUNCTION pollux.agent_password(p_role text, p_key bytea) RETURNS text LANGUAGE sql AS '';
CREATE FUNCTION pollux.agent_role_name(p_cluster text, p_uid bigint, p_key bytea) RETURNS text LANGUAGE sql AS '';
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
CREATE FUNCTION pollux.authorise(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text) RETURNS pollux.standing LANGUAGE plpgsql AS '';
CREATE FUNCTION pollux.choice_of(p_object jsonb, p_name text, p_choices text[]) RETURNS text LANGUAGE plpgsql AS '';
CREATE FUNCTION pollux.dismiss_users(p_cluster text) RETURNS SETOF text LANGUAGE plpgsql AS '';
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
CREATE FUNCTION pollux.hmac_sha256(message bytea, key bytea) RETURNS bytea LANGUAGE plpgsql AS '';
CREATE FUNCTION pollux.instructions(p_cluster text, p_job bigint, p_attempt integer) RETURNS jsonb LANGUAGE plpgsql AS '';
CREATE FUNCTION pollux.instructions_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text) RETURNS jsonb LANGUAGE plpgsql AS '';
CREATE FUNCTION pollux.number_of(p_object jsonb, p_name text, p_low double precision, p_high double precision) RETURNS double precision LANGUAGE plpgsql AS '';
CREATE FUNCTION pollux.object_of(p_object jsonb, p_name text) RETURNS jsonb LANGUAGE plpgsql AS '';
CREATE FUNCTION pollux.prior_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_fingerprint text, p_gpu_type text) RETURNS jsonb LANGUAGE plpgsql AS '';
CREATE FUNCTION pollux.publish_v1(p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS '';
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
CREATE FUNCTION pollux.report_of(p_payload jsonb) RETURNS pollux.report_history LANGUAGE plpgsql AS '';
CREATE FUNCTION pollux.required_number(p_object jsonb, p_name text, p_low double precision, p_high double precision) RETURNS double precision LANGUAGE plpgsql AS '';
CREATE FUNCTION pollux.stamps_of(p_object jsonb, p_name text) RETURNS jsonb LANGUAGE plpgsql AS '';
CREATE FUNCTION pollux.step_rank(step text) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT
    SET search_path TO 'pg_catalog'
    AS $$
    SELECT array_position(
        ARRAY['planned', 'draining', 'recruiting', 'checkpointed', 'requeued', 'configured', 'started',
              'training', 'parked', 'failed'], step)
$$;
CREATE FUNCTION pollux.type_name(p_value text) RETURNS text LANGUAGE plpgsql AS '';
CREATE TABLE pollux.acknowledgement (
    id bigint NOT NULL,
    cluster pollux.cluster_name NOT NULL,
    job_id bigint NOT NULL,
    attempt integer NOT NULL,
    move_id bigint NOT NULL,
    received_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    facts jsonb NOT NULL
);
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
CREATE TABLE pollux.secret (
    id bigint NOT NULL,
    cluster pollux.cluster_name NOT NULL,
    key bytea NOT NULL,
    installed_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT secret_key_check CHECK ((length(key) >= 16))
);
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
CREATE TABLE pollux.setting_audit (
    id bigint NOT NULL,
    cluster pollux.cluster_name NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    who text NOT NULL,
    name text NOT NULL,
    from_value jsonb,
    to_value jsonb
);
ALTER TABLE pollux.setting_audit ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME pollux.setting_audit_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
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
REVOKE USAGE ON SCHEMA public FROM PUBLIC;
GRANT USAGE ON SCHEMA public TO pollux_daemon;
REVOKE ALL ON LANGUAGE plpgsql FROM PUBLIC;
GRANT ALL ON LANGUAGE plpgsql TO pollux_daemon;
REVOKE ALL ON FUNCTION pollux.audit_setting() FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux.fence(p_cluster text, p_epoch bigint) FROM PUBLIC;
REVOKE ALL ON FUNCTION pollux.guard_move() FROM PUBLIC;
GRANT SELECT ON TABLE pollux.report_history TO pollux_read;
REVOKE ALL ON FUNCTION pollux.step_rank(step text) FROM PUBLIC;
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
RESET ROLE;
CREATE SCHEMA pollux_roles;
CREATE FUNCTION pollux_roles.admit(p_role text, p_password text, p_connections integer) RETURNS boolean LANGUAGE plpgsql AS '';
CREATE FUNCTION pollux_roles.dismiss(p_role text) RETURNS boolean LANGUAGE plpgsql AS '';
CREATE FUNCTION pollux_roles.end_sessions(p_seconds double precision) RETURNS TABLE(role name, ended bigint) LANGUAGE sql AS '';
CREATE TABLE pollux_roles.agent (
    role name NOT NULL,
    verifier text NOT NULL,
    settings text[] NOT NULL
);
COMMENT ON TABLE pollux_roles.agent IS 'agents'' roles as they were made: their users may change them (ALTER ROLE)';
ALTER TABLE ONLY pollux_roles.agent
    ADD CONSTRAINT agent_pkey PRIMARY KEY (role);
GRANT USAGE ON SCHEMA pollux_roles TO pollux_daemon;
DO $$DECLARE f regprocedure;
BEGIN
    FOR f IN SELECT p.oid FROM pg_catalog.pg_proc p WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.proname ~
        '^(lo_|loread$|lowrite$|pg_(try_)?advisory_|pg_cancel_backend$|pg_terminate_backend$|pg_export_snapshot$|pg_logical_emit_message$)'
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC; GRANT ALL ON FUNCTION %s TO pollux_daemon', f, f);
    END LOOP;
END$$;
