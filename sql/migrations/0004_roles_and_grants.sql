-- Agents' roles, and the grants of every role.

-- The role of a user's agents, and its password; the prolog derives both from the same secret (slurm_hooks/prolog).
CREATE FUNCTION pollux.agent_role_name(p_cluster text, p_uid bigint, p_key bytea) RETURNS text
    LANGUAGE sql STABLE
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
    SELECT 'pollux_' || p_cluster || '_' || p_uid || '_' || left(encode(hmac_sha256('role', p_key), 'hex'), 4)
$$;

CREATE FUNCTION pollux.agent_password(p_role text, p_key bytea) RETURNS text
    LANGUAGE sql STABLE
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
    SELECT encode(hmac_sha256(convert_to('password:' || p_role, 'UTF8'), p_key), 'hex')
$$;

-- Give the user of every job that has not ended a role per secret, and repair roles that their users have changed.
-- Return what was done or failed, by role. A user may hold a tenth of the server's connections: one per job where that
-- suffices, else his agents disconnect after each exchange.
CREATE FUNCTION pollux.admit_users(p_cluster text) RETURNS TABLE (admitted text, trouble text)
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pollux, pg_temp
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

-- Drop the roles of users who have had no job for a day, and of secrets that are forgotten. Return their names.
CREATE FUNCTION pollux.dismiss_users(p_cluster text) RETURNS SETOF text
    LANGUAGE plpgsql
    SET search_path = pg_catalog, pollux, pg_temp
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

-- Least privilege: roles have what is granted here, and nothing else.
REVOKE ALL ON SCHEMA pollux FROM PUBLIC;
REVOKE ALL ON SCHEMA pollux_crypto FROM PUBLIC;
ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;
REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pollux FROM PUBLIC;

GRANT USAGE ON SCHEMA pollux TO pollux_agent, pollux_read;
GRANT EXECUTE ON FUNCTION
    pollux.publish_v1(text, bigint, integer, bigint, text, jsonb),
    pollux.instructions_v1(text, bigint, integer, bigint, text),
    pollux.acknowledge_v1(text, bigint, integer, bigint, text, bigint, jsonb),
    pollux.prior_v1(text, bigint, integer, bigint, text, text, text)
TO pollux_agent;

GRANT SELECT ON pollux.job, pollux.report, pollux.acknowledgement, pollux.report_history, pollux.cycle, pollux.allocation,
    pollux.move, pollux.leader, pollux.setting, pollux.setting_audit, pollux.schema_migration, pollux.prior
TO pollux_read;
