-- Least privilege. Nothing is granted that is not listed here; functions lose Postgres' default EXECUTE for all.
REVOKE ALL ON SCHEMA pollux FROM PUBLIC;
REVOKE ALL ON SCHEMA pollux_crypto FROM PUBLIC;
ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;
REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pollux FROM PUBLIC;

GRANT USAGE ON SCHEMA pollux TO pollux_agent, pollux_read;
GRANT EXECUTE ON FUNCTION
    pollux.publish_v1(text, bigint, integer, bigint, text, jsonb),
    pollux.instructions_v1(text, bigint, integer, bigint, text),
    pollux.acknowledge_v1(text, bigint, integer, bigint, text, bigint, jsonb)
TO pollux_agent;

GRANT SELECT ON pollux.job, pollux.report, pollux.report_history, pollux.cycle, pollux.allocation,
    pollux.move, pollux.leader, pollux.setting, pollux.setting_audit, pollux.schema_migration
TO pollux_read;
