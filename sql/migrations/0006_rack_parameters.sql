-- As in 0002; a fit has both parameters of racks, or none.
CREATE OR REPLACE FUNCTION pollux.report_of(p_payload jsonb) RETURNS pollux.report_history
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
        IF num_nulls(decoded.alpha_rack, decoded.beta_rack) = 1 THEN
            RAISE EXCEPTION 'report: expected alpha_rack and beta_rack, or none of them' USING ERRCODE = 'PX422';
        END IF;
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
