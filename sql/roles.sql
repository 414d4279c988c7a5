-- Roles and database rights. Run by whoever may create roles: `polluxd migrate` runs it when it connects as a
-- superuser, a DBA may run it by hand (superuser). Idempotent. Passwords and pg_hba.conf stay the site's own business.
--
--   pollux_daemon  owns schema `pollux`; polluxd and `polluxctl` (writing) connect as it
--   pollux_agent   what the tickets in the jobs name: may EXECUTE the `_v1` functions and nothing else
--   pollux_read    dashboards: may SELECT everything but the token secret

DO $$
DECLARE
    role_name text;
BEGIN
    FOREACH role_name IN ARRAY ARRAY['pollux_daemon', 'pollux_agent', 'pollux_read'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role_name) THEN
            EXECUTE format('CREATE ROLE %I LOGIN', role_name);
        END IF;
    END LOOP;
    EXECUTE format('GRANT CONNECT, CREATE ON DATABASE %I TO pollux_daemon', current_database());
    EXECUTE format('GRANT CONNECT ON DATABASE %I TO pollux_agent, pollux_read', current_database());
    -- Agents come from users' jobs: no temporary tables to fill the disk with.
    -- However many jobs there are, polluxd and administrators find a connection.
    EXECUTE format('ALTER ROLE pollux_agent CONNECTION LIMIT %s',
                   greatest(current_setting('max_connections')::integer * 8 / 10, 1));
    EXECUTE format('REVOKE TEMPORARY ON DATABASE %I FROM PUBLIC', current_database());
END
$$;

-- A stuck agent or a careless dashboard query must not hold the database.
ALTER ROLE pollux_agent SET statement_timeout = '5s';
ALTER ROLE pollux_agent SET lock_timeout = '2s';
ALTER ROLE pollux_agent SET idle_in_transaction_session_timeout = '10s';
-- All agents share one role, and a role may read its own sessions' statements in pg_stat_activity; refused ones go
-- to the server's log. Their statements carry tokens. Only a superuser may set these two, so no agent can undo them.
ALTER ROLE pollux_agent SET track_activities = off;
ALTER ROLE pollux_agent SET log_min_error_statement = 'panic';
ALTER ROLE pollux_read SET statement_timeout = '30s';
ALTER ROLE pollux_read SET default_transaction_read_only = on;
