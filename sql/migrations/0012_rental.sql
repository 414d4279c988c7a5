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
    PRIMARY KEY (cluster, day, type, account, user_name, job_id)
);
COMMENT ON TABLE pollux.rental IS 'what rented nodes have cost, by day (UTC), type of node, and job that was on them';
COMMENT ON COLUMN pollux.rental.job_id IS '0: the nodes stood idle, or booted for nobody';
COMMENT ON COLUMN pollux.rental.gpu_seconds IS 'GPU time that the job held there';

GRANT SELECT ON pollux.rental TO pollux_read;
