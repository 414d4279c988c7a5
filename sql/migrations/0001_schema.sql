-- The schema of the first release. Until then a change is made here; from then on it is a file with the next number.
-- Every key starts with `cluster`: several clusters may share one database.
-- Columns that people read are timestamptz. Times inside jsonb are POSIX seconds.

-- NaN sorts above infinity in Postgres, so the upper bound refuses both.
CREATE DOMAIN pollux.amount AS double precision CHECK (VALUE >= 0 AND VALUE < 'infinity');
CREATE DOMAIN pollux.finite AS double precision CHECK (VALUE > '-infinity' AND VALUE < 'infinity');
-- Slurm allows 40 bytes.
CREATE DOMAIN pollux.cluster_name AS text CHECK (VALUE <> '' AND VALUE !~ '[:[:space:]]' AND octet_length(VALUE) <= 40);

CREATE TABLE pollux.job (
    cluster       pollux.cluster_name NOT NULL,
    job_id        bigint NOT NULL CHECK (job_id > 0),
    uid           bigint NOT NULL CHECK (uid >= 0),
    name          text NOT NULL DEFAULT '',
    user_name     text NOT NULL DEFAULT '',
    account       text NOT NULL DEFAULT '',
    partition     text NOT NULL DEFAULT '',
    spec          jsonb NOT NULL,
    state         text NOT NULL CHECK (state IN ('PENDING', 'RUNNING', 'COMPLETING', 'SUSPENDED',
                                                 'COMPLETED', 'FAILED', 'CANCELLED', 'GONE')),
    slurm_state   text NOT NULL DEFAULT '',
    slurm_reason  text NOT NULL DEFAULT '',
    attempt       integer NOT NULL DEFAULT 0 CHECK (attempt >= 0),
    nodes         text[] NOT NULL DEFAULT '{}',
    gpus          integer NOT NULL DEFAULT 0 CHECK (gpus >= 0),
    submitted_at  timestamptz NOT NULL,
    started_at    timestamptz,
    ended_at      timestamptz,
    seen_at       timestamptz NOT NULL DEFAULT now(),
    held_at       timestamptz,
    most_gpus     integer NOT NULL DEFAULT 0 CHECK (most_gpus >= 0),
    most_nodes    integer NOT NULL DEFAULT 0 CHECK (most_nodes >= 0),
    pinned_by     text,
    left_alone    text NOT NULL DEFAULT '',
    PRIMARY KEY (cluster, job_id)
);
COMMENT ON COLUMN pollux.job.state IS 'GONE: Slurm forgot the job before polluxd saw its end';
COMMENT ON COLUMN pollux.job.submitted_at IS 'first submission; Slurm resets its own at a requeue';
COMMENT ON COLUMN pollux.job.held_at IS 'when the job was last seen to hold GPUs';
COMMENT ON COLUMN pollux.job.most_gpus IS 'most GPUs that the job has held; it cannot have measured more';
COMMENT ON COLUMN pollux.job.pinned_by IS 'who pinned the job (polluxctl pin); its GPUs stay as they are';
COMMENT ON COLUMN pollux.job.left_alone IS 'why polluxd leaves the job to Slurm; empty: it does not';
CREATE INDEX job_active ON pollux.job (cluster) WHERE ended_at IS NULL;

-- The inbox: the gateway alone inserts rows into report_history, acknowledgement and fingerprint, after it has checked
-- each value (polluxd/gateway/payloads.py), and changes none. A report is one document, whose members are declared there.
-- report_history has no CHECK constraints, because Postgres parses each of them again for each insert: the statement that
-- inserts (store_reports) refuses a row of more than 2,048 bytes.
CREATE TABLE pollux.report_history (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    cluster      pollux.cluster_name NOT NULL,
    job_id       bigint NOT NULL,
    attempt      integer NOT NULL,
    uid          bigint NOT NULL,
    received_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    wakes        boolean NOT NULL DEFAULT false,
    report       jsonb NOT NULL
);
COMMENT ON TABLE pollux.report_history IS 'every report; thinned to one a minute after a day';
COMMENT ON COLUMN pollux.report_history.wakes IS 'a first step, a resize or a refusal: polluxd looks within half a second';
COMMENT ON COLUMN pollux.report_history.report IS 'the agent''s message without nulls; the reference of messages has its members';
CREATE INDEX report_latest ON pollux.report_history (cluster, job_id, attempt DESC, id DESC) INCLUDE (received_at);
CREATE INDEX report_by_time ON pollux.report_history USING brin (received_at);

CREATE VIEW pollux.report AS
    SELECT DISTINCT ON (cluster, job_id) * FROM pollux.report_history ORDER BY cluster, job_id, attempt DESC, id DESC;
COMMENT ON VIEW pollux.report IS 'the latest report of each job; quick for one job';

-- What a user's jobs have reported on a day (UTC): the bound of a user. The trigger counts, so the gateway changes no row.
CREATE TABLE pollux.reported (
    cluster  pollux.cluster_name NOT NULL,
    uid      bigint NOT NULL,
    day      date NOT NULL,
    reports  bigint NOT NULL,
    bytes    bigint NOT NULL,
    PRIMARY KEY (cluster, uid, day)
);
CREATE FUNCTION pollux.count_reports() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
BEGIN
    INSERT INTO reported AS r (cluster, uid, day, reports, bytes)
    SELECT cluster, uid, (clock_timestamp() AT TIME ZONE 'UTC')::date, count(*), sum(pg_column_size(report) + 128)
    FROM fresh GROUP BY cluster, uid ORDER BY cluster, uid
    ON CONFLICT (cluster, uid, day) DO UPDATE SET reports = r.reports + excluded.reports, bytes = r.bytes + excluded.bytes;
    RETURN NULL;
END
$$;
CREATE TRIGGER count AFTER INSERT ON pollux.report_history
    REFERENCING NEW TABLE AS fresh FOR EACH STATEMENT EXECUTE FUNCTION pollux.count_reports();

CREATE TABLE pollux.acknowledgement (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    cluster      pollux.cluster_name NOT NULL,
    job_id       bigint NOT NULL,
    attempt      integer NOT NULL,
    move_id      bigint NOT NULL,
    received_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    facts        jsonb NOT NULL
);
COMMENT ON TABLE pollux.acknowledgement IS 'agents tell that the checkpoint which a move asked for is durable';
CREATE INDEX acknowledgement_by_move ON pollux.acknowledgement (move_id);

-- Which training an attempt says it runs; the newest row of an attempt counts.
CREATE TABLE pollux.fingerprint (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    cluster      pollux.cluster_name NOT NULL,
    job_id       bigint NOT NULL,
    uid          bigint NOT NULL,
    attempt      integer NOT NULL,
    received_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    fingerprint  text NOT NULL CHECK (fingerprint ~ '^[0-9a-f]{16,64}$'),
    gpu_type     text NOT NULL
);
CREATE INDEX fingerprint_by_job ON pollux.fingerprint (cluster, job_id, attempt DESC, id DESC);

-- What earlier runs of a training (by fingerprint) of one user measured on one GPU type.
CREATE TABLE pollux.prior (
    cluster         pollux.cluster_name NOT NULL,
    uid             bigint NOT NULL,
    fingerprint     text NOT NULL CHECK (fingerprint ~ '^[0-9a-f]{16,64}$'),
    gpu_type        text NOT NULL,
    job_id          bigint NOT NULL,
    at              timestamptz NOT NULL,
    params          jsonb NOT NULL,
    explored_gpus   integer NOT NULL CHECK (explored_gpus >= 0),
    explored_nodes  integer NOT NULL CHECK (explored_nodes >= 0),
    refutes         boolean NOT NULL DEFAULT false,
    PRIMARY KEY (cluster, uid, fingerprint, gpu_type)
);
COMMENT ON COLUMN pollux.prior.refutes IS 'this run had measured that the fit before it was wrong';
COMMENT ON COLUMN pollux.prior.job_id IS 'the last job that measured it';

CREATE TABLE pollux.cycle (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    cluster      pollux.cluster_name NOT NULL,
    epoch        bigint,
    mode         text NOT NULL CHECK (mode IN ('observe', 'advise', 'enforce')),
    started_at   timestamptz NOT NULL,
    note         text NOT NULL DEFAULT '',
    objective    pollux.finite,
    upper_bound  pollux.finite,
    gap          pollux.amount,
    solver       text,
    durations    jsonb NOT NULL DEFAULT '{}',
    snapshot     jsonb,
    plan_digest  text
);
COMMENT ON COLUMN pollux.cycle.solver IS 'NULL: this cycle made no decision; note says why';
COMMENT ON COLUMN pollux.cycle.plan_digest IS 'SHA-256 of all decisions of the cycle, the unchanged ones included';
CREATE INDEX cycle_by_time ON pollux.cycle (cluster, started_at);

-- A row holds from its cycle on, until another cycle decides otherwise on the job, or not on it.
CREATE TABLE pollux.allocation (
    cycle_id       bigint NOT NULL REFERENCES pollux.cycle ON DELETE CASCADE,
    job_id         bigint NOT NULL,
    nodes          text[] NOT NULL,
    gpus_per_node  integer NOT NULL CHECK (gpus_per_node >= 0),
    gpus           integer NOT NULL CHECK (gpus >= 0),
    goodput        pollux.amount,
    speedup        pollux.amount,
    batch_size     integer NOT NULL CHECK (batch_size >= 0),
    changed        boolean NOT NULL,
    reason         text NOT NULL,
    explanation    jsonb,
    until          bigint,
    CHECK (gpus = cardinality(nodes) * gpus_per_node),
    PRIMARY KEY (cycle_id, job_id)
);
COMMENT ON COLUMN pollux.allocation.until IS 'the first cycle for which it does not hold any more; null: it holds';
CREATE INDEX allocation_by_job ON pollux.allocation (job_id, cycle_id);
CREATE INDEX allocation_until ON pollux.allocation (until, cycle_id);

CREATE FUNCTION pollux.step_rank(step text) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT
    SET search_path = pg_catalog
AS $$
    SELECT array_position(
        ARRAY['planned', 'draining', 'recruiting', 'checkpointed', 'requeued', 'configured', 'started',
              'training', 'parked', 'failed'], step)
$$;

CREATE TABLE pollux.move (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    cluster       pollux.cluster_name NOT NULL,
    job_id        bigint NOT NULL CHECK (job_id > 0),
    attempt       integer NOT NULL CHECK (attempt >= 0),
    path          text NOT NULL CHECK (path IN ('start', 'requeue', 'park', 'resize')),
    source        jsonb NOT NULL,
    target        jsonb NOT NULL,
    reason        text NOT NULL,
    step          text NOT NULL CHECK (pollux.step_rank(step) IS NOT NULL),
    times         jsonb NOT NULL,
    detail        text NOT NULL DEFAULT '',
    epoch         bigint NOT NULL,
    acknowledged  jsonb,
    resumed       jsonb,
    cancelled_by  text,
    ends_at       timestamptz,
    nonce         text NOT NULL DEFAULT replace(gen_random_uuid()::text, '-', '') CHECK (nonce ~ '^([0-9a-f]{32})?$')
);
COMMENT ON TABLE pollux.move IS 'moves of jobs between placements; each step is written before its action on Slurm';
COMMENT ON COLUMN pollux.move.times IS '{step: POSIX time at which the move reached it}';
COMMENT ON COLUMN pollux.move.acknowledged IS 'what the old attempt said of its last step and checkpoint';
COMMENT ON COLUMN pollux.move.resumed IS 'times of the new attempt: launched_at .. first_step_at';
COMMENT ON COLUMN pollux.move.cancelled_by IS 'who cancelled the move; in force until the job is requeued';
COMMENT ON COLUMN pollux.move.ends_at IS 'when the draining attempt would have reached its time limit';
COMMENT ON COLUMN pollux.move.nonce IS 'random; given to the job''s agent with the order to grow; its companion job states it';
CREATE INDEX move_by_job ON pollux.move (cluster, job_id, id);
CREATE UNIQUE INDEX move_one_open ON pollux.move (cluster, job_id)
    WHERE step NOT IN ('training', 'parked', 'failed');
-- The restart budget counts the drains of the last hour.
CREATE INDEX move_drained ON pollux.move (cluster, ((times ->> 'draining')::double precision))
    WHERE times ? 'draining';
-- Every cycle reads the resizes that failed after they had begun; there are few.
CREATE INDEX move_broken ON pollux.move (cluster, job_id)
    WHERE step = 'failed' AND path = 'resize';

-- A move's steps only go forward, and may be skipped: a first start drains nothing. A terminal step is final.
CREATE FUNCTION pollux.guard_move() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pollux, pg_temp
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
CREATE TRIGGER guard BEFORE INSERT OR UPDATE ON pollux.move
    FOR EACH ROW EXECUTE FUNCTION pollux.guard_move();

-- Leadership: this row elects, its epoch fences writes, its lease bounds how long a stalled leader may act.
CREATE TABLE pollux.leader (
    cluster      pollux.cluster_name PRIMARY KEY,
    epoch        bigint NOT NULL CHECK (epoch > 0),
    holder       text NOT NULL,
    since        timestamptz NOT NULL DEFAULT now(),
    lease_until  timestamptz NOT NULL
);

-- Raise unless `p_epoch` is the newest; keep a new leader waiting until this transaction ends.
CREATE FUNCTION pollux.fence(p_cluster text, p_epoch bigint) RETURNS void
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
BEGIN
    PERFORM FROM leader l WHERE l.cluster = p_cluster AND l.epoch = p_epoch FOR SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'epoch % no longer leads cluster % (now: %)', p_epoch, p_cluster,
            (SELECT l.epoch FROM leader l WHERE l.cluster = p_cluster) USING ERRCODE = 'PX001';
    END IF;
END
$$;

-- What administrators set with polluxctl, over the configuration file.
CREATE TABLE pollux.setting (
    cluster  pollux.cluster_name NOT NULL,
    name     text NOT NULL,
    value    jsonb NOT NULL,
    PRIMARY KEY (cluster, name),
    -- Names and shapes only: which values are allowed is declared once, in polluxd/config/settings.py.
    CONSTRAINT setting_name CHECK (name ~ '^[a-z][a-z_]{0,62}$'),
    CONSTRAINT setting_value CHECK (jsonb_typeof(value) <> 'array')
);

CREATE TABLE pollux.setting_audit (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    cluster     pollux.cluster_name NOT NULL,
    at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    who         text NOT NULL,
    name        text NOT NULL,
    from_value  jsonb,
    to_value    jsonb
);

-- A trigger, so that a change made by hand in psql is audited too.
CREATE FUNCTION pollux.audit_setting() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pollux, pg_temp
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
CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON pollux.setting
    FOR EACH ROW EXECUTE FUNCTION pollux.audit_setting();

-- Who may ask the gateway: an attempt of a job, or a user (no job) of polluxctl.
CREATE TABLE pollux.token (
    hash        bytea PRIMARY KEY,
    cluster     pollux.cluster_name NOT NULL,
    job_id      bigint,
    attempt     integer NOT NULL DEFAULT 0,
    uid         bigint NOT NULL,
    made_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at  timestamptz,
    CHECK (job_id IS NOT NULL OR expires_at IS NOT NULL)
);
COMMENT ON TABLE pollux.token IS 'tokens that the gateways have given out, hashed; those of a job die with its attempt';
COMMENT ON COLUMN pollux.token.hash IS 'SHA-256 of the token';
CREATE INDEX token_by_job ON pollux.token (cluster, job_id, attempt, uid);

-- What rented nodes have cost.
CREATE TABLE pollux.rental (
    cluster       pollux.cluster_name NOT NULL,
    day           date NOT NULL,
    type          text NOT NULL,
    account       text NOT NULL DEFAULT '',
    user_name     text NOT NULL DEFAULT '',
    job_id        bigint NOT NULL DEFAULT 0 CHECK (job_id >= 0),
    node_seconds  pollux.amount NOT NULL,
    gpu_seconds   pollux.amount NOT NULL,
    cost          pollux.amount NOT NULL,
    counted_at    timestamptz NOT NULL,
    saved_seconds double precision NOT NULL DEFAULT 0,
    PRIMARY KEY (cluster, day, type, account, user_name, job_id)
);
COMMENT ON TABLE pollux.rental IS 'what rented nodes have cost, by day (UTC), type of node, and job that was on them';
COMMENT ON COLUMN pollux.rental.job_id IS '0: the nodes stood idle, or booted for nobody';
COMMENT ON COLUMN pollux.rental.gpu_seconds IS 'GPU time that the job held there';
COMMENT ON COLUMN pollux.rental.saved_seconds IS 'by how much sooner the job ends than on own nodes alone, as predicted';

-- Boots of nodes, which outlive a polluxd.
CREATE TABLE pollux.boots (
    cluster  pollux.cluster_name PRIMARY KEY,
    seen     jsonb NOT NULL
);
COMMENT ON TABLE pollux.boots IS 'how long boots of nodes took, which nodes failed to boot, and since when nodes are on';

-- When jobs were to start and end, as a run of `polluxd.forecast` foretold it from the snapshot of a cycle; the newest 600.
CREATE TABLE pollux.forecast (
    cluster   pollux.cluster_name NOT NULL,
    cycle_id  bigint NOT NULL,
    foretold  jsonb NOT NULL,
    PRIMARY KEY (cluster, cycle_id)
);

-- Why an attempt may say nothing: `over` (it, or the job), or `unknown` (polluxd has neither started it nor seen it run);
-- null: it may. An attempt that polluxd has not seen yet is at most the next one.
CREATE FUNCTION pollux.refusal(job pollux.job, attempt integer) RETURNS text
    LANGUAGE sql STABLE
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
    SELECT CASE
        WHEN attempt < job.attempt OR job.ended_at IS NOT NULL AND attempt = job.attempt THEN 'over'
        WHEN job.ended_at IS NOT NULL OR attempt > job.attempt + 1 THEN 'unknown'
        WHEN job.started_at IS NULL AND NOT EXISTS (
            SELECT FROM pollux.move m WHERE m.cluster = job.cluster AND m.job_id = job.job_id
              AND to_timestamp((m.times ->> 'planned')::double precision) >= job.submitted_at) THEN 'unknown' END
$$;

-- Least privilege: roles have what is granted here, and nothing else.
REVOKE ALL ON SCHEMA pollux FROM PUBLIC;
ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;
REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pollux FROM PUBLIC;

GRANT USAGE ON SCHEMA pollux TO pollux_gateway, pollux_read;
GRANT SELECT ON pollux.job, pollux.report, pollux.acknowledgement, pollux.report_history, pollux.cycle, pollux.allocation,
    pollux.move, pollux.leader, pollux.setting, pollux.setting_audit, pollux.schema_migration, pollux.prior,
    pollux.rental, pollux.boots, pollux.reported, pollux.forecast
TO pollux_read;
GRANT SELECT ON pollux.job, pollux.report, pollux.report_history, pollux.acknowledgement, pollux.fingerprint, pollux.prior,
    pollux.cycle, pollux.allocation, pollux.move, pollux.leader, pollux.setting, pollux.schema_migration, pollux.token,
    pollux.reported, pollux.forecast
TO pollux_gateway;
GRANT INSERT ON pollux.report_history, pollux.acknowledgement, pollux.fingerprint, pollux.token TO pollux_gateway;
GRANT EXECUTE ON FUNCTION pollux.refusal TO pollux_gateway;
