-- Reading what agents send: each function raises PX422, and names the member that makes no sense.

-- A number of a JSON object; NULL if absent or null. Raise unless it is a finite number within the bounds.
CREATE FUNCTION pollux.number_of(p_object jsonb, p_name text, p_low double precision, p_high double precision)
    RETURNS double precision
    LANGUAGE plpgsql IMMUTABLE
    SET search_path = pg_catalog
AS $$
DECLARE
    found text := jsonb_typeof(p_object -> p_name);
    value double precision;
BEGIN
    IF found IS NULL OR found = 'null' THEN
        RETURN NULL;
    END IF;
    IF found = 'number' THEN
        BEGIN
            value := (p_object ->> p_name)::double precision;
        EXCEPTION WHEN numeric_value_out_of_range THEN
            value := NULL;
        END;
    END IF;
    IF value IS NULL OR NOT (value >= p_low AND value <= p_high) THEN
        RAISE EXCEPTION 'report: % must be a finite number from % to %, got %',
            p_name, p_low, p_high, left(p_object ->> p_name, 40) USING ERRCODE = 'PX422';
    END IF;
    RETURN value;
END
$$;

CREATE FUNCTION pollux.required_number(p_object jsonb, p_name text, p_low double precision, p_high double precision)
    RETURNS double precision
    LANGUAGE plpgsql IMMUTABLE
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
DECLARE
    value double precision := number_of(p_object, p_name, p_low, p_high);
BEGIN
    IF value IS NULL THEN
        RAISE EXCEPTION 'report: % is missing', p_name USING ERRCODE = 'PX422';
    END IF;
    RETURN value;
END
$$;

-- An object of POSIX times, each null or not in the future. Raise otherwise.
CREATE FUNCTION pollux.stamps_of(p_object jsonb, p_name text) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
DECLARE
    stamps jsonb := coalesce(nullif(p_object -> p_name, 'null'), '{}');
    member text;
BEGIN
    IF jsonb_typeof(stamps) <> 'object' OR (SELECT count(*) FROM jsonb_object_keys(stamps)) > 16 THEN
        RAISE EXCEPTION 'report: % must be an object of at most 16 times', p_name USING ERRCODE = 'PX422';
    END IF;
    FOR member IN SELECT jsonb_object_keys(stamps) LOOP
        PERFORM number_of(stamps, member, 0, extract(epoch FROM clock_timestamp()) + 300);
    END LOOP;
    RETURN stamps;
END
$$;

-- A GPU type of at most 64 printable characters, or ''. Raise otherwise.
CREATE FUNCTION pollux.type_name(p_value text) RETURNS text
    LANGUAGE plpgsql IMMUTABLE
    SET search_path = pg_catalog
AS $$
BEGIN
    IF length(p_value) > 64 OR p_value ~ '[^[:print:]]' THEN
        RAISE EXCEPTION 'gpu_type: expected at most 64 printable characters' USING ERRCODE = 'PX422';
    END IF;
    RETURN coalesce(p_value, '');
END
$$;

-- A text of a JSON object that must be one of `p_choices`; NULL if absent or null. Raise otherwise.
CREATE FUNCTION pollux.choice_of(p_object jsonb, p_name text, p_choices text[]) RETURNS text
    LANGUAGE plpgsql IMMUTABLE
    SET search_path = pg_catalog
AS $$
DECLARE
    value text := p_object ->> p_name;
BEGIN
    IF NOT value = ANY(p_choices) THEN
        RAISE EXCEPTION 'report: % must be one of %, got %', p_name, array_to_string(p_choices, ', '), left(value, 40)
            USING ERRCODE = 'PX422';
    END IF;
    RETURN value;
END
$$;

-- A JSON object, or NULL if absent or null. Raise otherwise.
CREATE FUNCTION pollux.object_of(p_object jsonb, p_name text) RETURNS jsonb
    LANGUAGE plpgsql IMMUTABLE
    SET search_path = pg_catalog
AS $$
DECLARE
    value jsonb := nullif(p_object -> p_name, 'null');
BEGIN
    IF value IS NOT NULL AND jsonb_typeof(value) <> 'object' THEN
        RAISE EXCEPTION 'report: % must be an object', p_name USING ERRCODE = 'PX422';
    END IF;
    RETURN value;
END
$$;

-- The row of a report's JSON payload. Raise, naming the member, where one makes no sense.
CREATE FUNCTION pollux.report_of(p_payload jsonb) RETURNS pollux.report_history
    LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, pollux, pg_temp
AS $$
DECLARE
    big      constant double precision := 1e12;
    whole    constant double precision := 2147483647;
    params   jsonb;
    noise    jsonb;
    limits   jsonb;
    advice   jsonb;
    refusal  jsonb;
    decoded  report_history;
BEGIN
    IF jsonb_typeof(p_payload) IS DISTINCT FROM 'object' OR pg_column_size(p_payload) > 16384 THEN
        RAISE EXCEPTION 'report: expected a JSON object of at most 16 KiB' USING ERRCODE = 'PX422';
    END IF;
    IF (p_payload -> 'v') IS DISTINCT FROM '1' THEN
        RAISE EXCEPTION 'report: expected version 1, got %', left(p_payload ->> 'v', 20) USING ERRCODE = 'PX422';
    END IF;
    IF jsonb_typeof(p_payload -> 'checkpointed') IS DISTINCT FROM 'boolean' THEN
        RAISE EXCEPTION 'report: checkpointed must be true or false' USING ERRCODE = 'PX422';
    END IF;
    IF jsonb_typeof(nullif(p_payload -> 'prior_refuted', 'null')) <> 'boolean' THEN
        RAISE EXCEPTION 'report: prior_refuted must be true or false' USING ERRCODE = 'PX422';
    END IF;
    params := object_of(p_payload, 'params');
    noise := object_of(p_payload, 'noise');
    limits := object_of(p_payload, 'limits');
    advice := object_of(p_payload, 'advice');
    refusal := object_of(p_payload, 'resize_refused');

    decoded.at := to_timestamp(required_number(p_payload, 'at', 0, extract(epoch FROM clock_timestamp()) + 300));
    IF params IS NOT NULL THEN
        decoded.alpha_grad := required_number(params, 'alpha_grad', 0, big);
        decoded.beta_grad := required_number(params, 'beta_grad', 0, big);
        decoded.alpha_local := required_number(params, 'alpha_local', 0, big);
        decoded.beta_local := required_number(params, 'beta_local', 0, big);
        decoded.alpha_node := required_number(params, 'alpha_node', 0, big);
        decoded.beta_node := required_number(params, 'beta_node', 0, big);
        decoded.gamma := required_number(params, 'gamma', 1, 10);
        decoded.alpha_rack := number_of(params, 'alpha_rack', 0, big);
        decoded.beta_rack := number_of(params, 'beta_rack', 0, big);
    END IF;
    IF noise IS NOT NULL THEN
        decoded.noise_sqr := required_number(noise, 'sqr', 0, 1e300);
        decoded.noise_var := required_number(noise, 'var', 0, 1e300);
    END IF;
    decoded.batch_initial := required_number(limits, 'initial', 1, whole);
    decoded.batch_maximum := required_number(limits, 'maximum', decoded.batch_initial, whole);
    decoded.local_min := required_number(limits, 'local_min', 1, whole);
    decoded.local_max := required_number(limits, 'local_max', decoded.local_min, whole);
    decoded.explored_gpus := required_number(p_payload, 'explored_gpus', 0, 1e6);
    decoded.explored_nodes := required_number(p_payload, 'explored_nodes', 0, 1e6);
    decoded.measured_gpus := number_of(p_payload, 'measured_gpus', 0, 1e6);
    decoded.measured_nodes := number_of(p_payload, 'measured_nodes', 0, 1e6);
    decoded.prior_gpus := coalesce(number_of(p_payload, 'prior_gpus', 0, 1e6), 0);
    decoded.prior_nodes := coalesce(number_of(p_payload, 'prior_nodes', 0, 1e6), 0);
    decoded.prior_refuted := coalesce((p_payload ->> 'prior_refuted')::boolean, false);
    decoded.gpu_type := type_name(p_payload ->> 'gpu_type');
    decoded.gpus := required_number(p_payload, 'gpus', 0, 1e6);
    decoded.nodes := required_number(p_payload, 'nodes', 0, 1e6);
    decoded.batch_size := required_number(p_payload, 'batch_size', 0, whole);
    decoded.local_batch := required_number(p_payload, 'local_batch', 0, whole);
    decoded.accumulation := required_number(p_payload, 'accumulation', 0, whole);
    decoded.goodput := required_number(p_payload, 'goodput', 0, big);
    decoded.throughput := required_number(p_payload, 'throughput', 0, big);
    decoded.data_wait := number_of(p_payload, 'data_wait', 0, 1);
    decoded.progress := required_number(p_payload, 'progress', 0, 1e15);
    decoded.target := number_of(p_payload, 'target', 0, 1e15);
    decoded.epoch := required_number(p_payload, 'epoch', 0, big);
    decoded.lr_factor := required_number(p_payload, 'lr_factor', 0, big);
    decoded.gain := required_number(p_payload, 'gain', 0, big);
    decoded.optimizer_steps := required_number(p_payload, 'optimizer_steps', 0, 1e15);
    decoded.checkpointed := (p_payload ->> 'checkpointed')::boolean;
    decoded.times := stamps_of(p_payload, 'times');
    decoded.restart_cost := number_of(p_payload, 'restart_cost', 0, 1e9);
    decoded.mode := choice_of(p_payload, 'mode', ARRAY['observe', 'advise', 'enforce']);
    IF advice IS NOT NULL THEN
        decoded.advice := jsonb_build_object(
            'batch_size', required_number(advice, 'batch_size', 1, whole),
            'local_batch', required_number(advice, 'local_batch', 1, whole),
            'accumulation', required_number(advice, 'accumulation', 0, whole),
            'goodput_ratio', required_number(advice, 'goodput_ratio', 0, big));
    END IF;
    decoded.resize := choice_of(p_payload, 'resize', ARRAY['in-place', 'relaunch', 'requeue']);
    decoded.resized := coalesce(number_of(p_payload, 'resized', 0, 9e15), 0);
    IF refusal IS NOT NULL THEN
        decoded.resize_refused := jsonb_build_object(
            'id', required_number(refusal, 'id', 1, 9e15),
            'why', left(regexp_replace(coalesce(refusal ->> 'why', ''), '[^[:print:]]+', ' ', 'g'), 300));
    END IF;
    decoded.resize_cost := number_of(p_payload, 'resize_cost', 0, 1e9);
    RETURN decoded;
END
$$;
