-- Knowledge across runs: what an earlier run of the same training (by fingerprint) of the same user has measured.

CREATE TABLE pollux.prior (
    cluster         pollux.cluster_name NOT NULL,
    uid             bigint NOT NULL,
    fingerprint     text NOT NULL CHECK (fingerprint ~ '^[0-9a-f]{16,64}$'),
    job_id          bigint NOT NULL,
    at              timestamptz NOT NULL,
    alpha_grad      pollux.amount NOT NULL,
    beta_grad       pollux.amount NOT NULL,
    alpha_local     pollux.amount NOT NULL,
    beta_local      pollux.amount NOT NULL,
    alpha_node      pollux.amount NOT NULL,
    beta_node       pollux.amount NOT NULL,
    gamma           pollux.amount NOT NULL CHECK (gamma BETWEEN 1 AND 10),
    explored_gpus   integer NOT NULL CHECK (explored_gpus >= 0),
    explored_nodes  integer NOT NULL CHECK (explored_nodes >= 0),
    PRIMARY KEY (cluster, uid, fingerprint)
);
COMMENT ON COLUMN pollux.prior.job_id IS 'the job that measured it last';

-- Which fingerprint a job's attempt said it has.
CREATE TABLE pollux.fingerprint (
    cluster      pollux.cluster_name NOT NULL,
    job_id       bigint NOT NULL,
    uid          bigint NOT NULL,
    attempt      integer NOT NULL,
    fingerprint  text NOT NULL CHECK (fingerprint ~ '^[0-9a-f]{16,64}$'),
    PRIMARY KEY (cluster, job_id)
);

-- A fit replaces an earlier one unless that one had seen more GPUs or nodes: a later, smaller run knows less of them.
CREATE FUNCTION pollux.remember_prior() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pollux
AS $$
BEGIN
    INSERT INTO prior AS p
    SELECT f.cluster, f.uid, f.fingerprint, NEW.job_id, NEW.received_at, NEW.alpha_grad, NEW.beta_grad,
           NEW.alpha_local, NEW.beta_local, NEW.alpha_node, NEW.beta_node, NEW.gamma, NEW.explored_gpus,
           NEW.explored_nodes
    FROM fingerprint f
    WHERE f.cluster = NEW.cluster AND f.job_id = NEW.job_id AND f.uid = NEW.uid AND f.attempt = NEW.attempt
    ON CONFLICT (cluster, uid, fingerprint) DO UPDATE SET
        job_id = excluded.job_id, at = excluded.at, alpha_grad = excluded.alpha_grad,
        beta_grad = excluded.beta_grad, alpha_local = excluded.alpha_local, beta_local = excluded.beta_local,
        alpha_node = excluded.alpha_node, beta_node = excluded.beta_node, gamma = excluded.gamma,
        explored_gpus = excluded.explored_gpus, explored_nodes = excluded.explored_nodes
    WHERE excluded.explored_gpus >= p.explored_gpus AND excluded.explored_nodes >= p.explored_nodes;
    RETURN NULL;
END
$$;
CREATE TRIGGER remember_prior AFTER INSERT OR UPDATE ON pollux.report
    FOR EACH ROW WHEN (NEW.gamma IS NOT NULL AND NEW.explored_gpus > 0)
    EXECUTE FUNCTION pollux.remember_prior();

-- Say which training this is, and hear what is known of it: null, or {"params": {...}, "explored_gpus",
-- "explored_nodes"}. Reports of this attempt are remembered under the fingerprint from now on. Only the same user's
-- runs are known by it.
CREATE FUNCTION pollux.prior_v1(
    p_cluster text, p_job bigint, p_attempt integer, p_uid bigint, p_token text, p_fingerprint text) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
BEGIN
    PERFORM authorise(p_cluster, p_job, p_attempt, p_uid, p_token);
    IF p_fingerprint IS NULL OR p_fingerprint !~ '^[0-9a-f]{16,64}$' THEN
        RAISE EXCEPTION 'fingerprint: expected 16 to 64 hexadecimal digits' USING ERRCODE = 'PX422';
    END IF;
    INSERT INTO fingerprint VALUES (p_cluster, p_job, p_uid, p_attempt, p_fingerprint)
    ON CONFLICT (cluster, job_id) DO UPDATE
    SET uid = excluded.uid, attempt = excluded.attempt, fingerprint = excluded.fingerprint;
    RETURN (
        SELECT jsonb_build_object(
            'params', jsonb_build_object(
                'alpha_grad', p.alpha_grad, 'beta_grad', p.beta_grad, 'alpha_local', p.alpha_local,
                'beta_local', p.beta_local, 'alpha_node', p.alpha_node, 'beta_node', p.beta_node, 'gamma', p.gamma),
            'explored_gpus', p.explored_gpus, 'explored_nodes', p.explored_nodes)
        FROM prior p WHERE p.cluster = p_cluster AND p.uid = p_uid AND p.fingerprint = p_fingerprint);
END
$$;

GRANT EXECUTE ON FUNCTION pollux.prior_v1(text, bigint, integer, bigint, text, text) TO pollux_agent;
GRANT SELECT ON pollux.prior TO pollux_read;
