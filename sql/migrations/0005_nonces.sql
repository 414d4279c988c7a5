-- A move has a nonce, which only the agent of its job is told. A companion job shows by it that the move ordered it.
-- Moves from before have none: the companions that have joined for them stay.
ALTER TABLE pollux.move ADD COLUMN nonce text NOT NULL DEFAULT '' CHECK (nonce ~ '^([0-9a-f]{32})?$');
ALTER TABLE pollux.move ALTER COLUMN nonce SET DEFAULT replace(gen_random_uuid()::text, '-', '');
COMMENT ON COLUMN pollux.move.nonce IS 'random; told to the job''s agent with the order to grow; its companion job states it';

CREATE OR REPLACE FUNCTION pollux.guard_move() RETURNS trigger
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

-- As in 0003; an order to grow has the nonce of its move.
CREATE OR REPLACE FUNCTION pollux.instructions(p_cluster text, p_job bigint, p_attempt integer) RETURNS jsonb
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
