-- Everything polluxd remembers. Keys start with `cluster`, so that several clusters may share one database.
-- Times are timestamptz where a person reads them, POSIX seconds inside jsonb.

-- NaN sorts above infinity in Postgres, so the upper bound refuses both.
CREATE DOMAIN pollux.amount AS double precision CHECK (VALUE >= 0 AND VALUE < 'infinity');
CREATE DOMAIN pollux.finite AS double precision CHECK (VALUE > '-infinity' AND VALUE < 'infinity');
-- A colon would make the message that a token signs ambiguous.
CREATE DOMAIN pollux.cluster_name AS text CHECK (VALUE <> '' AND VALUE !~ '[:[:space:]]' AND length(VALUE) <= 64);

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
    PRIMARY KEY (cluster, job_id)
);
COMMENT ON COLUMN pollux.job.state IS 'GONE: ended while nobody looked, and Slurm has forgotten how';
COMMENT ON COLUMN pollux.job.submitted_at IS 'first seen submission: a requeue resets Slurm''s own';
CREATE INDEX job_active ON pollux.job (cluster) WHERE ended_at IS NULL;

-- No foreign key to job: an agent may report before polluxd has seen its job.
CREATE TABLE pollux.report (
    cluster         pollux.cluster_name NOT NULL,
    job_id          bigint NOT NULL,
    attempt         integer NOT NULL CHECK (attempt >= 0),
    uid             bigint NOT NULL,
    at              timestamptz NOT NULL,
    received_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    alpha_grad      pollux.amount,
    beta_grad       pollux.amount,
    alpha_local     pollux.amount,
    beta_local      pollux.amount,
    alpha_node      pollux.amount,
    beta_node       pollux.amount,
    gamma           pollux.amount CHECK (gamma BETWEEN 1 AND 10),
    noise_sqr       pollux.amount,
    noise_var       pollux.amount,
    batch_initial   integer NOT NULL CHECK (batch_initial >= 1),
    batch_maximum   integer NOT NULL CHECK (batch_maximum >= batch_initial),
    local_min       integer NOT NULL CHECK (local_min >= 1),
    local_max       integer NOT NULL CHECK (local_max >= local_min),
    explored_gpus   integer NOT NULL CHECK (explored_gpus >= 0),
    explored_nodes  integer NOT NULL CHECK (explored_nodes >= 0),
    gpus            integer NOT NULL CHECK (gpus >= 0),
    nodes           integer NOT NULL CHECK (nodes >= 0),
    batch_size      integer NOT NULL CHECK (batch_size >= 0),
    local_batch     integer NOT NULL CHECK (local_batch >= 0),
    accumulation    integer NOT NULL CHECK (accumulation >= 0),
    goodput         pollux.amount NOT NULL,
    throughput      pollux.amount NOT NULL,
    progress        pollux.amount NOT NULL,
    target          pollux.amount,
    epoch           pollux.amount NOT NULL,
    lr_factor       pollux.amount NOT NULL,
    gain            pollux.amount NOT NULL,
    optimizer_steps bigint NOT NULL CHECK (optimizer_steps >= 0),
    checkpointed    boolean NOT NULL,
    times           jsonb NOT NULL,
    restart_cost    pollux.amount,
    CHECK (num_nulls(alpha_grad, beta_grad, alpha_local, beta_local, alpha_node, beta_node, gamma) IN (0, 7)),
    CHECK (num_nulls(noise_sqr, noise_var) IN (0, 2)),
    PRIMARY KEY (cluster, job_id)
);
COMMENT ON TABLE pollux.report IS 'the latest report of each job';

CREATE TABLE pollux.report_history (LIKE pollux.report INCLUDING ALL EXCLUDING INDEXES);
ALTER TABLE pollux.report_history DROP COLUMN times;
ALTER TABLE pollux.report_history ADD PRIMARY KEY (cluster, job_id, received_at);
COMMENT ON TABLE pollux.report_history IS 'reports over time, at most one a second and job';

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
    snapshot     jsonb
);
COMMENT ON COLUMN pollux.cycle.solver IS 'NULL: no decision was made this cycle; note says why';
CREATE INDEX cycle_by_time ON pollux.cycle (cluster, started_at);

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
    CHECK (gpus = cardinality(nodes) * gpus_per_node),
    PRIMARY KEY (cycle_id, job_id)
);
CREATE INDEX allocation_by_job ON pollux.allocation (job_id, cycle_id);

CREATE TABLE pollux.move (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    cluster       pollux.cluster_name NOT NULL,
    job_id        bigint NOT NULL CHECK (job_id > 0),
    attempt       integer NOT NULL CHECK (attempt >= 0),
    path          text NOT NULL CHECK (path IN ('start', 'requeue', 'park', 'relaunch', 'resize')),
    source        jsonb NOT NULL,
    target        jsonb NOT NULL,
    reason        text NOT NULL,
    step          text NOT NULL,
    times         jsonb NOT NULL,
    detail        text NOT NULL DEFAULT '',
    epoch         bigint NOT NULL,
    acknowledged  jsonb,
    resumed       jsonb
);
COMMENT ON TABLE pollux.move IS 'moves, written before each action on Slurm';
COMMENT ON COLUMN pollux.move.times IS '{step: POSIX time at which it was reached}';
COMMENT ON COLUMN pollux.move.acknowledged IS 'what the old attempt said of its stop and checkpoint';
COMMENT ON COLUMN pollux.move.resumed IS 'times of the new attempt: launched_at .. first_step_at';
CREATE INDEX move_by_job ON pollux.move (cluster, job_id, id);
CREATE UNIQUE INDEX move_one_open ON pollux.move (cluster, job_id)
    WHERE step NOT IN ('training', 'parked', 'failed');

CREATE FUNCTION pollux.step_rank(step text) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT
    SET search_path = pg_catalog
AS $$
    SELECT array_position(
        ARRAY['planned', 'draining', 'checkpointed', 'requeued', 'configured', 'started',
              'training', 'parked', 'failed'], step)
$$;
ALTER TABLE pollux.move ADD CHECK (pollux.step_rank(step) IS NOT NULL);

-- Steps only go forward (they may be skipped: a first start drains nothing), and an end is an end.
CREATE FUNCTION pollux.guard_move() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pollux
AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF NEW.step <> 'planned' THEN
            RAISE EXCEPTION 'a move begins at step planned, not %', NEW.step USING ERRCODE = 'PX409';
        END IF;
    ELSE
        IF (OLD.id, OLD.cluster, OLD.job_id, OLD.attempt, OLD.path, OLD.source, OLD.target)
           IS DISTINCT FROM (NEW.id, NEW.cluster, NEW.job_id, NEW.attempt, NEW.path, NEW.source, NEW.target) THEN
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
        RAISE EXCEPTION 'move %: step % came without its time', NEW.id, NEW.step USING ERRCODE = 'PX422';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER guard BEFORE INSERT OR UPDATE ON pollux.move
    FOR EACH ROW EXECUTE FUNCTION pollux.guard_move();

-- Leadership: the advisory lock elects, the epoch fences writes, the lease bounds how long a stalled leader may act.
CREATE TABLE pollux.leader (
    cluster      pollux.cluster_name PRIMARY KEY,
    epoch        bigint NOT NULL CHECK (epoch > 0),
    holder       text NOT NULL,
    since        timestamptz NOT NULL DEFAULT now(),
    lease_until  timestamptz NOT NULL
);

CREATE TABLE pollux.setting (
    cluster  pollux.cluster_name NOT NULL,
    name     text NOT NULL,
    value    jsonb NOT NULL,
    PRIMARY KEY (cluster, name),
    CONSTRAINT setting_value CHECK (CASE name
        WHEN 'power' THEN jsonb_typeof(value) = 'number' AND (value)::double precision <= 1 OR value = '"-inf"'
        WHEN 'account_weights' THEN jsonb_typeof(value) = 'object' AND NOT value @? '$.* ? (!(@ > 0))'
        WHEN 'user_weights' THEN jsonb_typeof(value) = 'object' AND NOT value @? '$.* ? (!(@ > 0))'
        WHEN 'paused' THEN jsonb_typeof(value) = 'boolean'
        WHEN 'partial_nodes' THEN jsonb_typeof(value) = 'boolean'
        ELSE false END)
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
    SET search_path = pg_catalog, pollux
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

-- Keys that sign the jobs' tokens; the newest two of a cluster are accepted, so that a key can be rotated.
CREATE TABLE pollux.secret (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    cluster       pollux.cluster_name NOT NULL,
    key           bytea NOT NULL CHECK (length(key) >= 16),
    installed_at  timestamptz NOT NULL DEFAULT now(),
    UNIQUE (cluster, key)
);
