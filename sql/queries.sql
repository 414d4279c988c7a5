-- Every statement that polluxd runs, by name (polluxd/store/sqlfiles.py reads this file).
-- A line `-- name: NAME` starts a query; the comment lines below it describe it; `:word` is a parameter.

-- name: applied_migrations
SELECT name FROM pollux.schema_migration;

-- name: lead_claim
-- Take the lead: the next epoch. No row while the lease of another leader runs.
INSERT INTO pollux.leader AS l (cluster, epoch, holder, lease_until)
VALUES (:cluster, 1, :holder, clock_timestamp() + make_interval(secs => :lease_s))
ON CONFLICT (cluster) DO UPDATE
SET epoch = l.epoch + 1, holder = excluded.holder, since = now(), lease_until = excluded.lease_until
WHERE l.lease_until <= clock_timestamp()
RETURNING epoch;

-- name: lead_renew
-- Extend the lease; no row when another epoch leads.
UPDATE pollux.leader SET lease_until = clock_timestamp() + make_interval(secs => :lease_s)
WHERE cluster = :cluster AND epoch = :epoch
RETURNING epoch;

-- name: lead_resign
-- End the lease, so that the next leader may act at once.
UPDATE pollux.leader SET lease_until = clock_timestamp() WHERE cluster = :cluster AND epoch = :epoch;

-- name: leader
-- trouble: what the leader's session is called (`Leadership.tell`), at most 63 bytes; other roles do not see it.
SELECT epoch, holder, since, lease_until > clock_timestamp() AS leased, (
    SELECT split_part(application_name, ':', 3) FROM pg_stat_activity
    WHERE usename = current_user AND datname = current_database()
    AND application_name = left(
        :trouble || epoch || ':' || split_part(application_name, ':', 3) || ':' || :cluster, 63
    ) LIMIT 1
) AS trouble
FROM pollux.leader WHERE cluster = :cluster;

-- name: fence
-- Raises PX001 unless this epoch leads.
SELECT pollux.fence(:cluster, :epoch);

-- name: settings
SELECT name, value FROM pollux.setting WHERE cluster = :cluster;

-- name: set_who
-- Who the audit trigger names, for this transaction.
SELECT set_config('pollux.who', :who, true);

-- name: set_setting
INSERT INTO pollux.setting (cluster, name, value) VALUES (:cluster, :name, CAST(:value AS jsonb))
ON CONFLICT (cluster, name) DO UPDATE SET value = excluded.value;

-- name: setting_audit
SELECT at, who, name, from_value, to_value FROM pollux.setting_audit
WHERE cluster = :cluster ORDER BY id DESC LIMIT :newest;

-- name: newest_reports
-- The latest report of each job that has not ended, by its id. One of an attempt that polluxd has not seen does not count.
-- An acknowledged drain says that a checkpoint exists. What
-- earlier runs were measured on is polluxd's own record (known_gpus).
SELECT h.job_id, h.id, EXISTS (
           SELECT FROM pollux.move m
           WHERE m.cluster = j.cluster AND m.job_id = h.job_id AND m.attempt = h.attempt
             AND m.acknowledged IS NOT NULL AND m.path <> 'resize') AS drained,
       coalesce(k.gpus, 0) AS known_gpus, coalesce(k.nodes, 0) AS known_nodes
FROM pollux.job j
CROSS JOIN LATERAL (
    SELECT r.job_id, r.id, r.attempt FROM pollux.report_history r WHERE r.cluster = j.cluster AND r.job_id = j.job_id
      AND r.attempt <= j.attempt
    ORDER BY r.attempt DESC, r.id DESC LIMIT 1) h
LEFT JOIN LATERAL (
    SELECT max(p.explored_gpus) AS gpus, max(p.explored_nodes) AS nodes
    FROM pollux.fingerprint f
    JOIN pollux.prior p ON p.cluster = f.cluster AND p.uid = f.uid AND p.fingerprint = f.fingerprint
    WHERE f.cluster = j.cluster AND f.job_id = j.job_id AND f.uid = j.uid) k ON true
WHERE j.cluster = :cluster AND j.ended_at IS NULL;

-- name: reports
SELECT job_id, attempt, received_at, report FROM pollux.report_history
WHERE cluster = :cluster AND id = ANY(CAST(:ids AS bigint[]));

-- name: news
-- Whether a move under way has heard from its job since report :seen: what polluxd interrupts its wait for. It reads the
-- reports since then alone: twice a second.
SELECT coalesce((SELECT max(h.id) FROM pollux.report_history h), 0) AS newest, EXISTS (
    SELECT FROM pollux.move m
    WHERE m.cluster = :cluster AND m.step NOT IN ('training', 'parked', 'failed') AND (
        m.step = 'draining' AND EXISTS (SELECT FROM pollux.acknowledgement a WHERE a.move_id = m.id)
        OR EXISTS (SELECT FROM pollux.report_history h
                   WHERE h.cluster = m.cluster AND h.job_id = m.job_id AND h.attempt = ANY(ARRAY[m.attempt, m.attempt + 1])
                     AND h.wakes AND h.id > :seen))) AS found;

-- name: take_acknowledgements
-- Moves whose drain an agent has acknowledged go on.
UPDATE pollux.move m
SET step = 'checkpointed', acknowledged = a.facts,
    times = m.times || jsonb_build_object('checkpointed', extract(epoch FROM a.received_at))
FROM pollux.acknowledgement a
WHERE m.cluster = :cluster AND m.step = 'draining'
  AND a.move_id = m.id AND a.cluster = m.cluster AND a.job_id = m.job_id AND a.attempt = m.attempt
RETURNING m.id;

-- name: remember_priors
-- Remember the latest fits of present jobs for later runs. A fit replaces an earlier fit unless that one was measured on
-- more GPUs or nodes; a fit that a run refuted is replaced in any case.
INSERT INTO pollux.prior AS p (cluster, uid, fingerprint, gpu_type, job_id, at, params, explored_gpus, explored_nodes, refutes)
SELECT DISTINCT ON (h.uid, f.fingerprint, f.gpu_type)
       h.cluster, h.uid, f.fingerprint, f.gpu_type, h.job_id, h.received_at, h.report -> 'params',
       least(d.gpus, j.most_gpus), least(d.nodes, j.most_nodes), d.refutes
FROM pollux.job j
CROSS JOIN LATERAL (
    SELECT * FROM pollux.report_history r WHERE r.cluster = j.cluster AND r.job_id = j.job_id
    ORDER BY r.attempt DESC, r.id DESC LIMIT 1) h
CROSS JOIN LATERAL (
    SELECT * FROM pollux.fingerprint r WHERE r.cluster = j.cluster AND r.job_id = j.job_id AND r.attempt = h.attempt
    ORDER BY r.id DESC LIMIT 1) f
CROSS JOIN LATERAL (
    SELECT CAST(coalesce(h.report -> 'measured_gpus', h.report -> 'explored_gpus') AS integer) AS gpus,
           CAST(coalesce(h.report -> 'measured_nodes', h.report -> 'explored_nodes') AS integer) AS nodes,
           coalesce(CAST(h.report -> 'prior_refuted' AS boolean), false) AS refutes) d
LEFT JOIN pollux.prior k ON k.cluster = j.cluster AND k.uid = h.uid AND k.fingerprint = f.fingerprint
    AND k.gpu_type = f.gpu_type
WHERE j.cluster = :cluster AND (j.ended_at IS NULL OR j.ended_at > now() - interval '1 hour')
  AND f.uid = h.uid AND f.gpu_type = coalesce(h.report ->> 'gpu_type', '') AND (k.at IS NULL OR h.received_at > k.at)
  AND h.report ? 'params' AND d.gpus > 0
ORDER BY h.uid, f.fingerprint, f.gpu_type, d.refutes DESC, d.gpus DESC, h.received_at DESC
ON CONFLICT (cluster, uid, fingerprint, gpu_type) DO UPDATE SET
    job_id = excluded.job_id, at = excluded.at, params = excluded.params, explored_gpus = excluded.explored_gpus,
    explored_nodes = excluded.explored_nodes, refutes = excluded.refutes
WHERE excluded.at > p.at AND (
    excluded.refutes OR excluded.explored_gpus >= p.explored_gpus AND excluded.explored_nodes >= p.explored_nodes);

-- name: fits_by_type
-- What runs of the same training, of the same user, measured on each GPU type, for jobs that have not ended: the newest 8.
SELECT j.job_id, p.gpu_type, p.params
FROM pollux.job j
CROSS JOIN LATERAL (
    SELECT * FROM pollux.fingerprint r WHERE r.cluster = j.cluster AND r.job_id = j.job_id
    ORDER BY r.attempt DESC, r.id DESC LIMIT 1) f
CROSS JOIN LATERAL (
    SELECT * FROM pollux.prior r WHERE r.cluster = f.cluster AND r.uid = f.uid AND r.fingerprint = f.fingerprint
      AND r.gpu_type <> '' ORDER BY r.at DESC LIMIT 8) p
WHERE j.cluster = :cluster AND j.ended_at IS NULL;

-- name: report_of
SELECT * FROM pollux.report_history WHERE cluster = :cluster AND job_id = :job_id ORDER BY attempt DESC, id DESC LIMIT 1;

-- name: report_history
-- At most :most of each job, evenly thinned. The index alone tells which; only those are read.
SELECT r.job_id, r.attempt, r.received_at, r.report FROM (
    SELECT id, row_number() OVER (PARTITION BY job_id ORDER BY attempt DESC, id DESC) - 1 AS place,
           count(*) OVER (PARTITION BY job_id) AS number
    FROM pollux.report_history
    WHERE cluster = :cluster AND (CAST(:job_id AS bigint) IS NULL OR job_id = :job_id)
      AND received_at >= to_timestamp(:since)) h
JOIN pollux.report_history r ON r.id = h.id
WHERE h.place % ((h.number + :most - 1) / :most) = 0
ORDER BY r.job_id, r.received_at;

-- name: forget_reused_jobs
-- Slurm's job ids start again when its state is wiped: rows of an earlier job must not stand for the new job.
WITH seen AS (
    SELECT * FROM jsonb_to_recordset(CAST(:jobs AS jsonb)) AS s(job_id bigint, attempt integer, ended boolean)
), reused AS (
    DELETE FROM pollux.job j USING seen s
    WHERE j.cluster = :cluster AND j.job_id = s.job_id AND (s.attempt < j.attempt
        OR j.ended_at IS NOT NULL AND j.state <> 'GONE' AND NOT s.ended AND s.attempt <= j.attempt)
    RETURNING j.job_id
), reports AS (
    DELETE FROM pollux.report_history r USING reused u WHERE r.cluster = :cluster AND r.job_id = u.job_id
), fingerprints AS (
    DELETE FROM pollux.fingerprint f USING reused u WHERE f.cluster = :cluster AND f.job_id = u.job_id
), tokens AS (
    DELETE FROM pollux.token t USING reused u WHERE t.cluster = :cluster AND t.job_id = u.job_id
)
SELECT job_id FROM reused;

-- name: upsert_jobs
INSERT INTO pollux.job AS j (cluster, job_id, uid, name, user_name, account, partition, spec, state, slurm_state,
    slurm_reason, attempt, nodes, gpus, submitted_at, started_at, ended_at, held_at, seen_at, most_gpus, most_nodes,
    left_alone)
SELECT :cluster, s.job_id, s.uid, s.name, s.user_name, s.account, s.partition, s.spec, s.state, s.slurm_state,
    s.slurm_reason, s.attempt, ARRAY(SELECT jsonb_array_elements_text(s.nodes)), s.gpus,
    to_timestamp(s.submitted_at), to_timestamp(s.started_at),
    CASE WHEN s.ended THEN coalesce(to_timestamp(s.ended_at), now()) END, CASE WHEN s.gpus > 0 THEN now() END, now(),
    s.gpus, jsonb_array_length(s.nodes), s.left_alone
FROM jsonb_to_recordset(CAST(:jobs AS jsonb)) AS s(
    job_id bigint, uid bigint, name text, user_name text, account text, partition text, spec jsonb, state text,
    slurm_state text, slurm_reason text, attempt integer, nodes jsonb, gpus integer, submitted_at double precision,
    started_at double precision, ended boolean, ended_at double precision, left_alone text)
ON CONFLICT (cluster, job_id) DO UPDATE SET
    uid = excluded.uid, name = excluded.name, user_name = excluded.user_name, account = excluded.account,
    partition = excluded.partition, spec = excluded.spec, state = excluded.state,
    slurm_state = excluded.slurm_state, slurm_reason = excluded.slurm_reason, attempt = excluded.attempt,
    nodes = excluded.nodes, gpus = excluded.gpus, submitted_at = least(j.submitted_at, excluded.submitted_at),
    started_at = least(j.started_at, excluded.started_at),
    ended_at = CASE WHEN excluded.ended_at IS NULL THEN NULL ELSE coalesce(j.ended_at, excluded.ended_at) END,
    held_at = CASE WHEN excluded.gpus > 0 OR j.gpus > 0 THEN now() ELSE j.held_at END, seen_at = now(),
    most_gpus = greatest(j.most_gpus, excluded.most_gpus), most_nodes = greatest(j.most_nodes, excluded.most_nodes),
    left_alone = excluded.left_alone
RETURNING j.job_id, j.submitted_at;

-- name: job_times
-- The row of a job that holds GPUs is as old as the last change of the job: it holds them now.
SELECT job_id, extract(epoch FROM submitted_at)::double precision AS submitted_at,
    extract(epoch FROM started_at)::double precision AS started_at,
    extract(epoch FROM CASE WHEN gpus > 0 THEN now() ELSE held_at END)::double precision AS held_at, most_gpus, most_nodes
FROM pollux.job WHERE cluster = :cluster AND ended_at IS NULL;

-- name: end_unseen_jobs
-- Jobs that Slurm has forgotten: they ended while nobody looked.
UPDATE pollux.job SET state = 'GONE', ended_at = now(), nodes = '{}', gpus = 0
WHERE cluster = :cluster AND ended_at IS NULL AND NOT job_id = ANY(:job_ids);

-- name: record_cycle
INSERT INTO pollux.cycle (cluster, epoch, mode, started_at, note, objective, upper_bound, gap, solver, durations,
    plan_digest)
VALUES (:cluster, :epoch, :mode, to_timestamp(:started_at), :note, :objective, :upper_bound, :gap, :solver,
        CAST(:durations AS jsonb), :plan_digest)
RETURNING id;

-- name: record_snapshot
UPDATE pollux.cycle SET snapshot = CAST(:snapshot AS jsonb) WHERE id = :cycle_id AND cluster = :cluster;

-- name: end_decisions
-- Decisions on these jobs, or on all, hold no longer.
UPDATE pollux.allocation a SET until = :cycle_id
FROM pollux.cycle c
WHERE c.id = a.cycle_id AND c.cluster = :cluster AND a.until IS NULL
  AND (:everything OR a.job_id = ANY(CAST(:job_ids AS bigint[])));

-- name: record_allocations
INSERT INTO pollux.allocation (cycle_id, job_id, nodes, gpus_per_node, gpus, goodput, speedup, batch_size, changed, reason,
    explanation)
SELECT :cycle_id, a.job_id, ARRAY(SELECT jsonb_array_elements_text(a.nodes)), a.gpus_per_node, a.gpus, a.goodput,
       a.speedup, a.batch_size, a.changed, a.reason, nullif(a.explanation, 'null')
FROM jsonb_to_recordset(CAST(:allocations AS jsonb)) AS a(
    job_id bigint, nodes jsonb, gpus_per_node integer, gpus integer, goodput double precision,
    speedup double precision, batch_size integer, changed boolean, reason text,
    explanation jsonb);

-- name: latest_cycle
SELECT id, epoch, mode, started_at, note, objective, upper_bound, gap, solver, durations, plan_digest
FROM pollux.cycle WHERE cluster = :cluster ORDER BY id DESC LIMIT 1;

-- name: cycle
SELECT id, epoch, mode, started_at, note, objective, upper_bound, gap, solver, durations, plan_digest
FROM pollux.cycle WHERE cluster = :cluster AND id = :id;

-- name: cycles
-- The newest first, with what was decided on and whether it can be decided again.
SELECT c.id, c.epoch, c.mode, c.started_at, c.note, c.objective, c.upper_bound, c.gap, c.solver, c.durations, c.plan_digest,
       c.snapshot IS NOT NULL AS kept, d.jobs, d.changed
FROM (SELECT * FROM pollux.cycle WHERE cluster = :cluster ORDER BY id DESC LIMIT :newest) c
CROSS JOIN LATERAL (
    SELECT count(*) AS jobs, count(*) FILTER (WHERE a.changed) AS changed
    FROM (SELECT cycle_id, changed FROM pollux.allocation WHERE until IS NULL AND cycle_id <= c.id
          UNION ALL
          SELECT cycle_id, changed FROM pollux.allocation WHERE until > c.id AND cycle_id <= c.id) a
    JOIN pollux.cycle o ON o.id = a.cycle_id AND o.cluster = c.cluster
    WHERE c.solver IS NOT NULL) d
ORDER BY c.id DESC;

-- name: cycles_between
-- With `kept`, those alone whose snapshots are.
SELECT id, epoch, mode, started_at, note, objective, upper_bound, gap, solver, durations, plan_digest
FROM pollux.cycle
WHERE cluster = :cluster AND started_at BETWEEN to_timestamp(:since) AND to_timestamp(:until)
  AND (snapshot IS NOT NULL OR NOT :kept) ORDER BY id LIMIT 100000;

-- name: cluster_over_time
-- One decision of each :every_s seconds since :since: GPUs in service, those of plain and of Pollux jobs, the least that
-- waiting jobs need, and the mean predicted speedup of the jobs with GPUs.
SELECT extract(epoch FROM c.started_at)::double precision AS at, n.gpus, n.plain, j.held, j.waiting, d.speedup
FROM (SELECT DISTINCT ON (floor(extract(epoch FROM started_at) / :every_s)) id, started_at, snapshot
      FROM pollux.cycle
      WHERE cluster = :cluster AND snapshot IS NOT NULL AND started_at >= to_timestamp(:since)
      ORDER BY floor(extract(epoch FROM started_at) / :every_s), id DESC) c
CROSS JOIN LATERAL (
    SELECT coalesce(sum((e ->> 'gpus')::integer), 0) AS gpus, coalesce(sum((e ->> 'foreign_gpus')::integer), 0) AS plain
    FROM jsonb_array_elements(c.snapshot -> 'nodes') e WHERE coalesce((e ->> 'schedulable')::boolean, true)) n
CROSS JOIN LATERAL (
    SELECT coalesce(sum(jsonb_array_length(e -> 'placement' -> 'nodes') * (e -> 'placement' ->> 'gpus_per_node')::integer), 0)
        AS held,
        coalesce(sum((e -> 'spec' ->> 'min_gpus')::integer) FILTER (WHERE e -> 'placement' ->> 'gpus_per_node' = '0'), 0)
        AS waiting
    FROM jsonb_array_elements(c.snapshot -> 'jobs') e) j
CROSS JOIN LATERAL (
    SELECT avg(a.speedup)::double precision AS speedup
    FROM (SELECT cycle_id, speedup, gpus FROM pollux.allocation WHERE until IS NULL AND cycle_id <= c.id
          UNION ALL
          SELECT cycle_id, speedup, gpus FROM pollux.allocation WHERE until > c.id AND cycle_id <= c.id) a
    JOIN pollux.cycle o ON o.id = a.cycle_id AND o.cluster = :cluster
    WHERE a.gpus > 0) d
ORDER BY c.id LIMIT 1000;

-- name: newest_snapshot
SELECT id AS cycle_id, snapshot FROM pollux.cycle WHERE cluster = :cluster AND snapshot IS NOT NULL
ORDER BY id DESC LIMIT 1;

-- name: cycle_snapshot
SELECT snapshot FROM pollux.cycle WHERE cluster = :cluster AND id = :id;

-- name: allocations
-- The decisions that held in a cycle, made in it or before.
SELECT a.* FROM (
    SELECT * FROM pollux.allocation WHERE until IS NULL AND cycle_id <= :cycle_id
    UNION ALL
    SELECT * FROM pollux.allocation WHERE until > :cycle_id AND cycle_id <= :cycle_id) a
JOIN pollux.cycle o ON o.id = a.cycle_id
JOIN pollux.cycle c ON c.id = :cycle_id AND c.cluster = :cluster AND c.solver IS NOT NULL
WHERE o.cluster = :cluster ORDER BY a.job_id LIMIT 100000;

-- name: newest_decision
SELECT id, epoch, mode, started_at, note, objective, upper_bound, gap, solver, durations, plan_digest
FROM pollux.cycle WHERE cluster = :cluster AND solver IS NOT NULL ORDER BY id DESC LIMIT 1;

-- name: latest_allocation_of
SELECT a.* FROM pollux.allocation a JOIN pollux.cycle c ON c.id = a.cycle_id
WHERE c.cluster = :cluster AND a.job_id = :job_id ORDER BY a.cycle_id DESC LIMIT 1;

-- name: plan_move
INSERT INTO pollux.move (cluster, job_id, attempt, path, source, target, reason, step, times, epoch)
VALUES (:cluster, :job_id, :attempt, :path, CAST(:source AS jsonb), CAST(:target AS jsonb), :reason, 'planned',
        jsonb_build_object('planned', CAST(:at AS double precision)), :epoch)
RETURNING *;

-- name: advance
-- Go on to a later step; no row when the move is already there, beyond, or over. The end of a move takes along what
-- the new attempt said of its start, so that its cost stays readable after the report has moved on.
UPDATE pollux.move r
SET step = CAST(:step AS text),
    times = r.times || jsonb_build_object(CAST(:step AS text), CAST(:at AS double precision)),
    detail = concat_ws('; ', nullif(r.detail, ''), nullif(CAST(:detail AS text), '')),
    ends_at = coalesce(to_timestamp(CAST(:ends_at AS double precision)), r.ends_at),
    epoch = :epoch,
    resumed = coalesce(r.resumed, CASE WHEN :step = 'training' THEN (
        SELECT CASE r.path WHEN 'resize' THEN jsonb_strip_nulls(jsonb_build_object('resize_cost', p.report -> 'resize_cost'))
            ELSE coalesce(p.report -> 'times', '{}') END
        FROM (SELECT * FROM pollux.report_history h WHERE h.cluster = r.cluster AND h.job_id = r.job_id
              ORDER BY h.attempt DESC, h.id DESC LIMIT 1) p
        WHERE p.attempt >= r.attempt + CASE r.path WHEN 'requeue' THEN 1 ELSE 0 END) END)
WHERE r.id = :id AND r.cluster = :cluster AND r.step NOT IN ('training', 'parked', 'failed')
  AND pollux.step_rank(r.step) < pollux.step_rank(:step)
RETURNING r.id;

-- name: restarts_since
-- Restarts of running jobs that were ordered since :since, or are planned; by user, '' for forgotten jobs. A job that is
-- resized in place ends no process but those on the nodes that it gives back.
SELECT coalesce(j.user_name, '') AS user_name, count(*) AS restarts
FROM pollux.move m
LEFT JOIN pollux.job j ON j.cluster = m.cluster AND j.job_id = m.job_id
WHERE m.cluster = :cluster AND m.path IN ('requeue', 'park') AND (
    m.step = 'planned' OR m.times ? 'draining' AND (m.times ->> 'draining')::double precision >= :since)
GROUP BY 1;

-- name: move_to_cancel
-- The move under way, which stands still until it is decided whether it can be taken back.
SELECT * FROM pollux.move
WHERE cluster = :cluster AND job_id = :job_id AND step NOT IN ('training', 'parked', 'failed') FOR UPDATE;

-- name: cancel_move
UPDATE pollux.move SET cancelled_by = :cancelled_by WHERE cluster = :cluster AND id = :id;

-- name: pins
-- Jobs that stay as they are, and who pinned them.
SELECT job_id, pinned_by FROM pollux.job WHERE cluster = :cluster AND ended_at IS NULL AND pinned_by IS NOT NULL;

-- name: pin_of
SELECT pinned_by FROM pollux.job WHERE cluster = :cluster AND job_id = :job_id AND ended_at IS NULL FOR UPDATE;

-- name: set_pin
UPDATE pollux.job SET pinned_by = :pinned_by WHERE cluster = :cluster AND job_id = :job_id;

-- name: audit_order
-- An order is no setting; it is listed with their changes.
INSERT INTO pollux.setting_audit (cluster, who, name, from_value, to_value)
VALUES (:cluster, :who, :name, CAST(:from_value AS jsonb), CAST(:to_value AS jsonb));

-- name: open_moves
SELECT * FROM pollux.move
WHERE cluster = :cluster AND step NOT IN ('training', 'parked', 'failed') ORDER BY id;

-- name: resizes
-- Moves within allocations: those that companions name (:ids), and those of present attempts that failed once begun.
SELECT r.* FROM pollux.move r
LEFT JOIN pollux.job j ON j.cluster = r.cluster AND j.job_id = r.job_id
WHERE r.cluster = :cluster AND r.path = 'resize'
  AND (r.id = ANY(CAST(:ids AS bigint[]))
       OR r.step = 'failed' AND r.times ?| ARRAY['draining', 'recruiting']
          AND j.ended_at IS NULL AND r.attempt = j.attempt)
ORDER BY r.id;

-- name: moves
-- The newest :most.
SELECT * FROM (
    SELECT * FROM pollux.move WHERE cluster = :cluster AND (CAST(:job_id AS bigint) IS NULL OR job_id = :job_id)
    ORDER BY id DESC LIMIT :most) m
ORDER BY id;

-- name: completed_moves
-- Moves that ended in training, the newest :most. A job id used again is a new job.
SELECT * FROM (SELECT r.* FROM pollux.move r
LEFT JOIN pollux.job j ON j.cluster = r.cluster AND j.job_id = r.job_id
WHERE r.cluster = :cluster AND r.step = 'training'
  AND (j.submitted_at IS NULL OR to_timestamp((r.times ->> 'planned')::double precision) >= j.submitted_at)
ORDER BY r.id DESC LIMIT :most) m
ORDER BY id;

-- name: completed_moves_by_job
-- The newest :most of job :job_id, or of each job that has not ended: who moves often makes no decision and no answer long.
SELECT m.* FROM pollux.job j
CROSS JOIN LATERAL (
    SELECT * FROM pollux.move r
    WHERE r.cluster = j.cluster AND r.job_id = j.job_id AND r.step = 'training'
      AND to_timestamp((r.times ->> 'planned')::double precision) >= j.submitted_at
    ORDER BY r.id DESC LIMIT :most) m
WHERE j.cluster = :cluster
  AND CASE WHEN CAST(:job_id AS bigint) IS NULL THEN j.ended_at IS NULL ELSE j.job_id = :job_id END
ORDER BY m.id;

-- name: jobs_view
-- One row per job, of :most at most, of user :uid (null: of all); those that have not ended come first, then those that have
-- ended since :since. What it is, what it has, what it reports, what was last decided and moved.
SELECT j.job_id, j.uid, j.name, j.user_name, j.account, j.partition, j.state, j.slurm_reason, j.attempt, j.spec, j.nodes,
       j.gpus, j.submitted_at, j.started_at, j.ended_at, j.left_alone,
       p.received_at AS reported_at, p.report,
       a.speedup, a.reason AS decision_reason, a.cycle_id,
       m.step AS move_step, m.reason AS move_reason, m.detail AS move_detail,
       coalesce(n.count, 0) AS moves,
       CASE WHEN j.gpus > 0 AND j.ended_at IS NULL
                 AND (p.attempt = j.attempt AND p.report #> '{times,first_step_at}' IS NOT NULL) IS NOT TRUE
            THEN greatest(j.started_at, p.received_at, to_timestamp((m.times ->> 'started')::double precision))
       END AS silent_since
FROM (SELECT * FROM pollux.job
      WHERE cluster = :cluster AND (CAST(:job_id AS bigint) IS NULL OR job_id = :job_id)
        AND (CAST(:uid AS bigint) IS NULL OR uid = :uid)
        AND (ended_at IS NULL OR CAST(:job_id AS bigint) IS NOT NULL OR ended_at >= to_timestamp(:since))
      ORDER BY ended_at IS NULL DESC, job_id DESC LIMIT :most) j
LEFT JOIN LATERAL (
    SELECT * FROM pollux.report_history r WHERE r.cluster = j.cluster AND r.job_id = j.job_id AND r.attempt <= j.attempt
    ORDER BY r.attempt DESC, r.id DESC LIMIT 1) p ON true
LEFT JOIN LATERAL (
    SELECT a.speedup, a.reason, a.cycle_id FROM pollux.allocation a JOIN pollux.cycle c ON c.id = a.cycle_id
    WHERE a.job_id = j.job_id AND c.cluster = j.cluster AND c.started_at >= j.submitted_at - interval '1 minute'
    ORDER BY a.cycle_id DESC LIMIT 1) a ON true
LEFT JOIN LATERAL (
    SELECT r.path, r.step, r.reason, r.detail, r.times FROM pollux.move r
    WHERE r.cluster = j.cluster AND r.job_id = j.job_id ORDER BY r.id DESC LIMIT 1) m ON true
LEFT JOIN LATERAL (
    SELECT count(*) FROM pollux.move r
    WHERE r.cluster = j.cluster AND r.job_id = j.job_id AND r.step = 'training'
      AND (r.path <> 'start' OR r.attempt > 0)) n ON true
ORDER BY j.job_id;

-- name: record_rentals
INSERT INTO pollux.rental AS r (cluster, day, type, account, user_name, job_id, node_seconds, gpu_seconds, cost, saved_seconds, counted_at)
SELECT :cluster, s.day, s.type, s.account, s.user_name, s.job_id, s.node_seconds, s.gpu_seconds, s.cost, s.saved_seconds,
    to_timestamp(:at)
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS s(day date, type text, account text, user_name text, job_id bigint,
    node_seconds double precision, gpu_seconds double precision, cost double precision, saved_seconds double precision)
ON CONFLICT (cluster, day, type, account, user_name, job_id) DO UPDATE SET
    node_seconds = r.node_seconds + excluded.node_seconds, gpu_seconds = r.gpu_seconds + excluded.gpu_seconds,
    cost = r.cost + excluded.cost, saved_seconds = r.saved_seconds + excluded.saved_seconds, counted_at = excluded.counted_at;

-- name: spent
-- This month (UTC), by account; and up to when it was counted.
SELECT account, sum(cost) AS month, extract(epoch FROM max(counted_at))::double precision AS counted_at
FROM pollux.rental WHERE cluster = :cluster AND day >= date_trunc('month', now() AT TIME ZONE 'UTC') GROUP BY account;

-- name: rentals
SELECT day, type, account, user_name, job_id, node_seconds, gpu_seconds, cost, saved_seconds FROM pollux.rental
WHERE cluster = :cluster AND (cost > 0 OR saved_seconds <> 0) AND day >= (to_timestamp(:since) AT TIME ZONE 'UTC')::date
ORDER BY day, type, account, user_name, job_id;

-- name: boots
SELECT seen FROM pollux.boots WHERE cluster = :cluster;

-- name: record_boots
INSERT INTO pollux.boots (cluster, seen) VALUES (:cluster, CAST(:seen AS jsonb))
ON CONFLICT (cluster) DO UPDATE SET seen = excluded.seen;

-- name: ended_jobs
-- Jobs that ran and have ended since :since, the newest :most, each with its last report.
SELECT j.job_id, j.user_name, j.name, j.account, j.partition, j.spec, j.submitted_at, j.started_at, j.ended_at,
    p.attempt, p.received_at, p.report
FROM (SELECT * FROM pollux.job WHERE cluster = :cluster AND ended_at >= to_timestamp(:since) AND started_at IS NOT NULL
      ORDER BY ended_at DESC LIMIT :most) j
LEFT JOIN LATERAL (
    SELECT * FROM pollux.report_history r WHERE r.cluster = j.cluster AND r.job_id = j.job_id AND r.attempt <= j.attempt
    ORDER BY r.attempt DESC, r.id DESC LIMIT 1) p ON true
ORDER BY j.ended_at;

-- name: forecasts
SELECT cycle_id, foretold FROM pollux.forecast WHERE cluster = :cluster ORDER BY cycle_id DESC LIMIT :most;

-- name: record_forecast
INSERT INTO pollux.forecast (cluster, cycle_id, foretold) VALUES (:cluster, :cycle_id, CAST(:foretold AS jsonb))
ON CONFLICT DO NOTHING;

-- name: prune_forecasts
DELETE FROM pollux.forecast WHERE cluster = :cluster AND cycle_id NOT IN (
    SELECT cycle_id FROM pollux.forecast WHERE cluster = :cluster ORDER BY cycle_id DESC LIMIT :most);

-- name: prune_rentals
DELETE FROM pollux.rental WHERE cluster = :cluster AND day < (to_timestamp(:before) AT TIME ZONE 'UTC')::date;

-- name: prune_reported
DELETE FROM pollux.reported WHERE cluster = :cluster AND day < (to_timestamp(:before) AT TIME ZONE 'UTC')::date;

-- name: reported
-- Users whose jobs have reported most today (UTC), as shares of what a user may.
SELECT coalesce((SELECT j.user_name FROM pollux.job j WHERE j.cluster = r.cluster AND j.uid = r.uid AND j.user_name <> ''
                 ORDER BY j.job_id DESC LIMIT 1), '') AS user_name, r.uid, r.reports, r.bytes
FROM pollux.reported r WHERE r.cluster = :cluster AND r.day = (now() AT TIME ZONE 'UTC')::date
ORDER BY r.bytes DESC LIMIT 10;

-- name: prune_priors
-- What no run has confirmed for long, and what one user has beyond a thousand trainings.
DELETE FROM pollux.prior p WHERE p.cluster = :cluster AND (p.at < to_timestamp(:before) OR (p.uid, p.fingerprint, p.gpu_type) IN (
    SELECT q.uid, q.fingerprint, q.gpu_type FROM (
        SELECT uid, fingerprint, gpu_type, row_number() OVER (PARTITION BY uid ORDER BY at DESC) AS place
        FROM pollux.prior WHERE cluster = :cluster) q
    WHERE q.place > 1000));

-- name: prune_history
-- The latest report of a job stays as long as the job.
DELETE FROM pollux.report_history h WHERE h.cluster = :cluster AND h.received_at < to_timestamp(:before)
  AND EXISTS (SELECT FROM pollux.report_history n WHERE n.cluster = h.cluster AND n.job_id = h.job_id
              AND (n.attempt, n.id) > (h.attempt, h.id));

-- name: thin_history
-- One report a minute stays of reports that are older than a day.
DELETE FROM pollux.report_history h USING (
    SELECT id, row_number() OVER (PARTITION BY job_id, attempt, date_trunc('minute', received_at) ORDER BY id DESC) AS place
    FROM pollux.report_history WHERE cluster = :cluster
      AND received_at BETWEEN to_timestamp(:before) - interval '2 hours' AND to_timestamp(:before)) t
WHERE h.id = t.id AND t.place > 1;

-- name: prune_acknowledgements
DELETE FROM pollux.acknowledgement a WHERE a.cluster = :cluster AND a.received_at < to_timestamp(:before);

-- name: prune_decisions
-- Those that held in no cycle that stays.
DELETE FROM pollux.allocation a USING pollux.cycle c
WHERE c.id = a.cycle_id AND c.cluster = :cluster AND a.until <= coalesce(
    (SELECT min(id) FROM pollux.cycle WHERE cluster = :cluster AND started_at >= to_timestamp(:before)),
    (SELECT max(id) FROM pollux.cycle WHERE cluster = :cluster));

-- name: prune_cycles
-- The newest cycle stays, however old: `polluxctl explain` reads it. A cycle stays as long as a decision of it holds.
DELETE FROM pollux.cycle c WHERE cluster = :cluster AND started_at < to_timestamp(:before)
  AND id < (SELECT max(id) FROM pollux.cycle WHERE cluster = :cluster)
  AND NOT EXISTS (SELECT FROM pollux.allocation a WHERE a.cycle_id = c.id);

-- name: prune_snapshots
-- One in ten of mode observe stays, for the report's chapter on it.
UPDATE pollux.cycle SET snapshot = NULL
WHERE cluster = :cluster AND snapshot IS NOT NULL AND started_at < to_timestamp(:before)
  AND (mode <> 'observe' OR id % 10 <> 0);

-- name: prune_jobs
-- Ended jobs with all that hangs on them.
WITH gone AS (
    DELETE FROM pollux.job WHERE cluster = :cluster AND ended_at < to_timestamp(:before) RETURNING job_id
), reports AS (
    DELETE FROM pollux.report_history r USING gone g WHERE r.cluster = :cluster AND r.job_id = g.job_id
), fingerprints AS (
    DELETE FROM pollux.fingerprint f USING gone g WHERE f.cluster = :cluster AND f.job_id = g.job_id
)
DELETE FROM pollux.move m USING gone g WHERE m.cluster = :cluster AND m.job_id = g.job_id
  AND m.step IN ('training', 'parked', 'failed');

-- name: prune_tokens
-- Those that open nothing any more.
DELETE FROM pollux.token t USING (
    SELECT n.hash, row_number() OVER (PARTITION BY n.job_id, n.attempt, n.uid ORDER BY n.made_at DESC) AS age
    FROM pollux.token n WHERE n.cluster = :cluster) k
WHERE t.hash = k.hash AND (k.age > 8 OR t.expires_at < now() OR t.job_id IS NOT NULL AND NOT EXISTS (
    SELECT FROM pollux.job j WHERE j.cluster = t.cluster AND j.job_id = t.job_id AND j.ended_at IS NULL
      AND t.attempt >= j.attempt));

-- The gateway's statements. A refusal is one of pollux.refusal or of polluxd/gateway/records.py; null: none.

-- name: attempt_of
-- What polluxd has seen of the job of a credential.
SELECT j.uid, pollux.refusal(j, :attempt) AS refusal
FROM pollux.job j WHERE j.cluster = :cluster AND j.job_id = :job_id;

-- name: issue_token
-- The role may delete nothing: whoever may delete rows may also lock the table, for which polluxd would wait.
INSERT INTO pollux.token (hash, cluster, job_id, attempt, uid, expires_at)
VALUES (decode(:hash, 'hex'), :cluster, :job_id, :attempt, :uid,
        clock_timestamp() + make_interval(secs => CAST(:expires_s AS double precision)));

-- name: token_of
-- The 8 newest of an attempt, or of a user, are good.
SELECT t.job_id, t.attempt, t.uid,
       CAST(extract(epoch FROM t.expires_at - clock_timestamp()) AS double precision) AS expires_s,
       CASE WHEN t.job_id IS NULL THEN NULL WHEN j.job_id IS NULL THEN 'unknown'
            WHEN j.uid <> t.uid THEN 'over' ELSE pollux.refusal(j, t.attempt) END AS refusal
FROM pollux.token t LEFT JOIN pollux.job j ON j.cluster = t.cluster AND j.job_id = t.job_id
WHERE t.hash = decode(:hash, 'hex') AND t.cluster = :cluster
  AND (t.expires_at IS NULL OR t.expires_at > clock_timestamp())
  AND NOT EXISTS (
    SELECT FROM pollux.token n
    WHERE n.cluster = t.cluster AND (n.job_id = t.job_id OR n.job_id IS NULL AND t.job_id IS NULL) AND n.attempt = t.attempt
      AND n.uid = t.uid AND n.made_at > t.made_at OFFSET 7);

-- name: store_reports
-- Reports of several jobs, each decided on by itself. Where a job's former report is older than 5 s, nobody reports much
-- oftener than this. A row has at most 2,048 bytes; its keys take less than 128. Postgres writes 5e-324
-- with all its zeros, so a report has at most twice that as text. A user who has reported :most_bytes
-- or :most_reports today (UTC) adds one report in 5 minutes for each job. A server that crashes within a second loses the
-- reports: the next ones stand for them.
WITH known AS MATERIALIZED (
    SELECT s.place, s.job_id, s.attempt, s.uid, s.report,
           CASE WHEN greatest(pg_column_size(s.report), octet_length(CAST(s.report AS text)) / 2) > 1920 THEN 'too-long'
                WHEN j.refusal IS NOT NULL THEN j.refusal
                WHEN j.known IS NULL THEN 'unknown'
                WHEN h.received_at > clock_timestamp() - interval '5 seconds' AND (
                    SELECT r.received_at FROM pollux.report_history r WHERE r.cluster = :cluster AND r.job_id = s.job_id
                    ORDER BY r.attempt DESC, r.id DESC OFFSET 119 LIMIT 1) > clock_timestamp() - interval '1 minute'
                THEN 'too-often'
                WHEN h.received_at > clock_timestamp() - interval '5 minutes' AND EXISTS (
                    SELECT FROM pollux.reported d WHERE d.cluster = :cluster AND d.uid = s.uid
                      AND d.day = (clock_timestamp() AT TIME ZONE 'UTC')::date
                      AND (d.bytes >= :most_bytes OR d.reports >= :most_reports))
                THEN 'too-much' END AS refusal,
           CASE WHEN h.attempt = s.attempt THEN h.news ELSE '[null, null, null]' END AS news
    FROM jsonb_to_recordset(CAST(:reports AS jsonb)) AS s(
        place integer, job_id bigint, attempt integer, uid bigint, report jsonb)
    LEFT JOIN LATERAL (
        SELECT true AS known, pollux.refusal(r, s.attempt) AS refusal FROM pollux.job r
        WHERE r.cluster = :cluster AND r.job_id = s.job_id AND r.uid = s.uid LIMIT 1) j ON true
    LEFT JOIN LATERAL (
        SELECT r.attempt, r.received_at, jsonb_build_array(r.report #> '{times,first_step_at}', nullif(r.report -> 'resized', '0'),
               r.report #> '{resize_refused,id}') AS news
        FROM pollux.report_history r WHERE r.cluster = :cluster AND r.job_id = s.job_id
        ORDER BY r.attempt DESC, r.id DESC LIMIT 1) h ON true
), stored AS (
    INSERT INTO pollux.report_history (cluster, job_id, attempt, uid, wakes, report)
    SELECT :cluster, k.job_id, k.attempt, k.uid, jsonb_build_array(k.report #> '{times,first_step_at}',
        nullif(k.report -> 'resized', '0'), k.report #> '{resize_refused,id}') <> k.news, k.report
    FROM known k WHERE k.refusal IS NULL ORDER BY k.place
)
SELECT k.refusal, set_config('synchronous_commit', 'off', true) FROM known k ORDER BY k.place;

-- name: acknowledge
-- Accepted where the move counts on the checkpoint, also when it is repeated because the first answer was lost.
WITH known AS (
    SELECT pollux.refusal(j, :attempt) AS refusal
    FROM pollux.job j WHERE j.cluster = :cluster AND j.job_id = :job_id AND j.uid = :uid
), asked AS (
    SELECT m.step, EXISTS (
        SELECT FROM pollux.acknowledgement a WHERE a.move_id = m.id AND a.cluster = m.cluster AND a.job_id = m.job_id
          AND a.attempt = m.attempt) AS repeated
    FROM pollux.move m
    WHERE m.id = :move_id AND m.cluster = :cluster AND m.job_id = :job_id AND m.attempt = :attempt
), stored AS (
    INSERT INTO pollux.acknowledgement (cluster, job_id, attempt, move_id, facts)
    SELECT :cluster, :job_id, :attempt, :move_id, CAST(:facts AS jsonb) FROM known k, asked m
    WHERE k.refusal IS NULL AND m.step = 'draining' AND NOT m.repeated
)
SELECT k.refusal, coalesce(CASE WHEN m.repeated THEN m.step <> 'failed' ELSE m.step = 'draining' END, false) AS accepted
FROM known k LEFT JOIN asked m ON true;

-- name: introduce
-- Which training an attempt runs, and what the same user's earlier runs of it measured. An attempt says it 20 times at most.
WITH known AS (
    SELECT CASE WHEN pollux.refusal(j, :attempt) IS NOT NULL THEN pollux.refusal(j, :attempt)
                WHEN (SELECT count(*) FROM pollux.fingerprint f WHERE f.cluster = j.cluster AND f.job_id = j.job_id
                      AND f.attempt = :attempt) >= 20 THEN 'too-often' END AS refusal
    FROM pollux.job j WHERE j.cluster = :cluster AND j.job_id = :job_id AND j.uid = :uid
), newest AS (
    SELECT f.fingerprint, f.gpu_type FROM pollux.fingerprint f
    WHERE f.cluster = :cluster AND f.job_id = :job_id AND f.attempt = :attempt ORDER BY f.id DESC LIMIT 1
), stored AS (
    INSERT INTO pollux.fingerprint (cluster, job_id, uid, attempt, fingerprint, gpu_type)
    SELECT :cluster, :job_id, :uid, :attempt, :fingerprint, :gpu_type FROM known k
    WHERE k.refusal IS NULL AND NOT EXISTS (
        SELECT FROM newest n WHERE n.fingerprint = :fingerprint AND n.gpu_type = :gpu_type)
)
SELECT k.refusal, p.params, p.explored_gpus, p.explored_nodes
FROM known k LEFT JOIN pollux.prior p ON p.cluster = :cluster AND p.uid = :uid AND p.fingerprint = :fingerprint
    AND p.gpu_type = :gpu_type;

-- name: attempts_over
-- Of attempts that ask for orders, those that are over.
SELECT w.place FROM jsonb_to_recordset(CAST(:asked AS jsonb)) AS w(place integer, job_id bigint, attempt integer, uid bigint)
JOIN pollux.job j ON j.cluster = :cluster AND j.job_id = w.job_id
WHERE j.uid <> w.uid OR pollux.refusal(j, w.attempt) = 'over';

-- name: open_orders
-- What the agents are to do now: a drain, or a resize within the allocation, of all jobs. A job has one open move at most.
-- A drain stands until its job is requeued: a drained agent that has no order any more trains on.
SELECT m.id, m.job_id, m.attempt, m.path, m.step, m.target, m.nonce, k.grows
FROM pollux.move m, LATERAL (
    SELECT m.path = 'resize'
           AND jsonb_array_length(m.target -> 'nodes') > jsonb_array_length(m.source -> 'nodes') AS grows) k
WHERE m.cluster = :cluster AND m.step NOT IN ('training', 'parked', 'failed')
  AND CASE WHEN k.grows THEN m.step IN ('recruiting', 'configured', 'started')
      WHEN m.path = 'resize' THEN m.step = 'draining' AND NOT EXISTS (
          SELECT FROM pollux.acknowledgement a WHERE a.move_id = m.id)
      ELSE m.step IN ('draining', 'checkpointed') END;
