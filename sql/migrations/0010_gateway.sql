-- The gateway (polluxd gateway) is the only way in for agents and users: they log in no more. What they called, and what
-- their credentials were checked against, goes.

DROP FUNCTION pollux.publish_v1(text, bigint, integer, bigint, text, jsonb);
DROP FUNCTION pollux.instructions_v1(text, bigint, integer, bigint, text);
DROP FUNCTION pollux.acknowledge_v1(text, bigint, integer, bigint, text, bigint, jsonb);
DROP FUNCTION pollux.prior_v1(text, bigint, integer, bigint, text, text, text);
DROP FUNCTION pollux.authorise(text, bigint, integer, bigint, text);
DROP FUNCTION pollux.instructions(text, bigint, integer);
DROP FUNCTION pollux.report_of(jsonb);
DROP FUNCTION pollux.number_of(jsonb, text, double precision, double precision);
DROP FUNCTION pollux.required_number(jsonb, text, double precision, double precision);
DROP FUNCTION pollux.stamps_of(jsonb, text);
DROP FUNCTION pollux.type_name(text);
DROP FUNCTION pollux.choice_of(jsonb, text, text[]);
DROP FUNCTION pollux.object_of(jsonb, text);
DROP FUNCTION pollux.admit_users(text);
DROP FUNCTION pollux.dismiss_users(text);
DROP FUNCTION pollux.agent_role_name(text, bigint, bytea);
DROP FUNCTION pollux.agent_password(text, bytea);
DROP FUNCTION pollux.hmac_sha256(bytea, bytea);
DROP TYPE pollux.standing;
DROP TABLE pollux.agent_role;
DROP TABLE pollux.secret;
-- Where a DBA has installed pgcrypto elsewhere, it stays; after a restore by a superuser, it belongs to that one.
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_catalog.pg_extension e WHERE e.extname = 'pgcrypto'
               AND e.extnamespace = 'pollux_crypto'::regnamespace) THEN
        DROP EXTENSION pgcrypto;
    END IF;
    DROP SCHEMA pollux_crypto;
EXCEPTION WHEN insufficient_privilege OR dependent_objects_still_exist THEN
    RAISE WARNING 'schema pollux_crypto with pgcrypto stays: drop it as a superuser';
END
$$;

-- Who may ask the gateway: an attempt of a job, or a user (no job) of polluxctl.
CREATE TABLE pollux.token (
    hash        bytea PRIMARY KEY,
    cluster     pollux.cluster_name NOT NULL,
    job_id      bigint,
    attempt     integer NOT NULL DEFAULT 0,
    uid         bigint NOT NULL,
    made_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at  timestamptz,
    CHECK (job_id IS NOT NULL OR expires_at IS NOT NULL)
);
COMMENT ON TABLE pollux.token IS 'tokens that the gateways have given out, hashed; those of a job die with its attempt';
COMMENT ON COLUMN pollux.token.hash IS 'SHA-256 of the token';
CREATE INDEX token_by_job ON pollux.token (cluster, job_id, attempt, uid);

ALTER TABLE pollux.job ADD COLUMN former_agent boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN pollux.job.former_agent IS
    'it ran under polluxd 0.1, whose agent has no way in any more: it trains on plainly, and is never moved';
UPDATE pollux.job SET former_agent = true WHERE ended_at IS NULL AND state <> 'PENDING';

COMMENT ON COLUMN pollux.report_history.wakes IS 'a first step, a resize or a refusal: polluxd looks within half a second';
COMMENT ON COLUMN pollux.move.nonce IS 'random; given to the job''s agent with the order to grow; its companion job states it';

GRANT USAGE ON SCHEMA pollux TO pollux_gateway;
GRANT SELECT ON pollux.job, pollux.report, pollux.report_history, pollux.acknowledgement, pollux.fingerprint, pollux.prior,
    pollux.cycle, pollux.allocation, pollux.move, pollux.leader, pollux.setting, pollux.schema_migration, pollux.token
TO pollux_gateway;
GRANT INSERT ON pollux.report_history, pollux.acknowledgement, pollux.fingerprint, pollux.token TO pollux_gateway;
