-- Roles and rights. A superuser runs this file once in Pollux' database, and again after an upgrade: `polluxd migrate` does
-- it when it connects as a superuser. Repeating it changes nothing. Passwords of the first three roles and pg_hba.conf are
-- the site's business.
--
--   pollux_daemon   owns schema `pollux`; polluxd and `polluxctl` (writing) connect as this role
--   pollux_read     dashboards: may SELECT everything except secrets
--   pollux_agent    a group that nobody logs in as: may EXECUTE the agents' `_v1` functions, and nothing else
--   pollux_CLUSTER_UID_XXXX   the agents of one unix user, a member of pollux_agent; polluxd makes it by pollux_roles.admit

DO $$
DECLARE
    role_name text;
    other text;
    exposed regprocedure;
BEGIN
    FOREACH role_name IN ARRAY ARRAY['pollux_daemon', 'pollux_agent', 'pollux_read'] LOOP
        IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = role_name) THEN
            EXECUTE pg_catalog.format('CREATE ROLE %I', role_name);
        END IF;
    END LOOP;
    ALTER ROLE pollux_daemon LOGIN;
    ALTER ROLE pollux_read LOGIN;
    ALTER ROLE pollux_agent NOLOGIN;

    IF current_setting('max_prepared_transactions')::integer > 0 THEN
        RAISE WARNING 'max_prepared_transactions is %: a user''s job can leave a prepared transaction, which no polluxd can end: '
            'set it to 0', current_setting('max_prepared_transactions');
    END IF;

    -- In this database nobody has rights that are not granted here.
    EXECUTE pg_catalog.format('REVOKE ALL ON DATABASE %I FROM PUBLIC', current_database());
    EXECUTE pg_catalog.format('GRANT CONNECT, CREATE ON DATABASE %I TO pollux_daemon', current_database());
    EXECUTE pg_catalog.format('GRANT CONNECT ON DATABASE %I TO pollux_agent, pollux_read', current_database());
    REVOKE ALL ON SCHEMA public FROM PUBLIC;
    GRANT USAGE ON SCHEMA public TO pollux_daemon;
    -- Without a procedural language an agent runs no loop, and raises no message into the server's log.
    REVOKE USAGE ON LANGUAGE plpgsql FROM PUBLIC;
    GRANT USAGE ON LANGUAGE plpgsql TO pollux_daemon;
    -- What PUBLIC may call that fills the disk (large objects, WAL messages, exported snapshots), fills the shared lock
    -- table (advisory locks), or ends sessions.
    FOR exposed IN
        SELECT p.oid::regprocedure FROM pg_catalog.pg_proc p
        WHERE p.pronamespace = 'pg_catalog'::regnamespace AND (
            p.proname ~ '^lo_|^pg_(try_)?advisory_|^pg_logical_emit_message$' OR p.proname IN (
                'loread', 'lowrite', 'pg_export_snapshot', 'pg_terminate_backend', 'pg_cancel_backend'))
    LOOP
        EXECUTE pg_catalog.format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', exposed);
        EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION %s TO pollux_daemon', exposed);
    END LOOP;

    -- Agents' roles can log in to every database of the server that PUBLIC may connect to.
    FOR other IN
        SELECT datname FROM pg_catalog.pg_database
        WHERE datallowconn AND datname <> current_database() AND datname <> 'template0'
          AND (datacl IS NULL OR EXISTS (
              SELECT FROM pg_catalog.aclexplode(datacl) WHERE grantee = 0 AND privilege_type = 'CONNECT'))
    LOOP
        IF other IN ('postgres', 'template1') THEN
            EXECUTE pg_catalog.format('REVOKE ALL ON DATABASE %I FROM PUBLIC', other);
        ELSE
            RAISE WARNING 'users'' jobs can connect to database %: keep them out (REVOKE CONNECT ON DATABASE % FROM '
                'PUBLIC, or a line in pg_hba.conf that rejects +pollux_agent)', other, other;
        END IF;
    END LOOP;
END
$$;

ALTER ROLE pollux_read SET statement_timeout = '30s';
ALTER ROLE pollux_read SET default_transaction_read_only = on;

-- Functions that need a superuser's rights. They take names and numbers, read no table of pollux_daemon's, and act on
-- agents' roles only.
CREATE SCHEMA IF NOT EXISTS pollux_roles;
REVOKE ALL ON SCHEMA pollux_roles FROM PUBLIC;
GRANT USAGE ON SCHEMA pollux_roles TO pollux_daemon;

CREATE TABLE IF NOT EXISTS pollux_roles.agent (
    role      name PRIMARY KEY,
    verifier  text NOT NULL,
    settings  text[] NOT NULL
);
COMMENT ON TABLE pollux_roles.agent IS 'agents'' roles as they were made: their users may change them (ALTER ROLE)';
REVOKE ALL ON pollux_roles.agent FROM PUBLIC;

-- Make an agents' role, or repair it when its user has changed it. True when it was made or repaired.
CREATE OR REPLACE FUNCTION pollux_roles.admit(p_role text, p_password text, p_connections integer) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    SET lock_timeout = '500ms'
    SET log_min_error_statement = 'panic'
AS $$
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
$$;

-- End the sessions of an agents' role and drop it. False where polluxd made no such role.
CREATE OR REPLACE FUNCTION pollux_roles.dismiss(p_role text) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    SET lock_timeout = '500ms'
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

-- End agents' sessions whose transaction or statement is older than `p_seconds`, and tell whose they were. An agent's own
-- take milliseconds; a user can switch every time limit of his role off, but not this one.
CREATE OR REPLACE FUNCTION pollux_roles.end_sessions(p_seconds double precision) RETURNS TABLE (role name, ended bigint)
    LANGUAGE sql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
AS $$
    SELECT s.usename, count(*) FILTER (WHERE pg_terminate_backend(s.pid))
    FROM pg_stat_activity s JOIN pollux_roles.agent a ON a.role = s.usename
    WHERE s.xact_start < clock_timestamp() - make_interval(secs => p_seconds)
    GROUP BY s.usename
$$;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA pollux_roles FROM PUBLIC;
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA pollux_roles TO pollux_daemon;
