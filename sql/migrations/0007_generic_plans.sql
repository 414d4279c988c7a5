-- Plan each statement of the agents' functions once in a session. By default Postgres plans a statement again at each of
-- its first five calls: that doubles the cost of an agent's first reports. No plan depends on the parameters' values.
ALTER FUNCTION pollux.publish_v1(text, bigint, integer, bigint, text, jsonb) SET plan_cache_mode = force_generic_plan;
ALTER FUNCTION pollux.instructions_v1(text, bigint, integer, bigint, text) SET plan_cache_mode = force_generic_plan;
ALTER FUNCTION pollux.acknowledge_v1(text, bigint, integer, bigint, text, bigint, jsonb)
    SET plan_cache_mode = force_generic_plan;
