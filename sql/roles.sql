-- Roles and rights. A superuser runs this file once in Pollux' database, and again after an upgrade: `polluxctl db init`
-- does it. Repeating it changes nothing. Passwords and pg_hba.conf are the site's business.
--
--   pollux_daemon    owns schema `pollux`; polluxd and `polluxctl` (writing) connect as this role
--   pollux_gateway   `polluxd gateway`, which users reach: the rights of its few statements
--   pollux_read      dashboards: may SELECT everything except tokens

DO $$
DECLARE
    role_name text;
BEGIN
    FOREACH role_name IN ARRAY ARRAY['pollux_daemon', 'pollux_gateway', 'pollux_read'] LOOP
        IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = role_name) THEN
            EXECUTE pg_catalog.format('CREATE ROLE %I', role_name);
        END IF;
        EXECUTE pg_catalog.format('ALTER ROLE %I LOGIN', role_name);
    END LOOP;

    -- In this database nobody has rights that are not granted here.
    EXECUTE pg_catalog.format('REVOKE ALL ON DATABASE %I FROM PUBLIC', current_database());
    EXECUTE pg_catalog.format('GRANT CONNECT, CREATE ON DATABASE %I TO pollux_daemon', current_database());
    EXECUTE pg_catalog.format('GRANT CONNECT ON DATABASE %I TO pollux_gateway, pollux_read', current_database());
    REVOKE ALL ON SCHEMA public FROM PUBLIC;
    GRANT USAGE ON SCHEMA public TO pollux_daemon;
END
$$;

ALTER ROLE pollux_read SET statement_timeout = '30s';
ALTER ROLE pollux_read SET default_transaction_read_only = on;
ALTER ROLE pollux_gateway SET temp_file_limit = '64MB';
