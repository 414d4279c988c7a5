-- Let PgBouncer check the agents' passwords. Run once in the database of polluxd, as a superuser:
--     psql --set=password=... --file=roles.sql DATABASE
-- The function gives the secrets of the agents' roles alone. polluxd's own roles and superusers cannot use the pooler.
\set ON_ERROR_STOP on
BEGIN;
CREATE ROLE pollux_pooler LOGIN PASSWORD :'password' CONNECTION LIMIT 5;
CREATE SCHEMA pollux_pooler;
CREATE FUNCTION pollux_pooler.secret_of(name pg_catalog.text, OUT role pg_catalog.text, OUT secret pg_catalog.text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT a.rolname::pg_catalog.text, a.rolpassword
    FROM pg_catalog.pg_authid a
    WHERE a.rolname = name AND EXISTS (SELECT FROM pollux.agent_role r WHERE r.role = a.rolname)
$$;
REVOKE ALL ON FUNCTION pollux_pooler.secret_of FROM PUBLIC;
GRANT USAGE ON SCHEMA pollux_pooler TO pollux_pooler;
GRANT EXECUTE ON FUNCTION pollux_pooler.secret_of TO pollux_pooler;
GRANT CONNECT ON DATABASE :"DBNAME" TO pollux_pooler;
COMMIT;
