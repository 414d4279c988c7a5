--[[
Pollux' job submission hook for Slurm (job_submit/lua).

Jobs opt in by a `#POLLUX` line in the batch script, by `sbatch --pollux=...` or by SBATCH_POLLUX in the environment;
every other job is left entirely alone.
A site's own job_submit.lua sets the table `pollux_config` and then runs this file:

    pollux_config = { gateway = "https://head.example.org:9851", lease_s = 300, trusted_users = { "pollux" } }
    dofile("/etc/pollux/hooks/job_submit.lua")

`polluxctl hooks install` writes these lines, and guards them: a missing, unreadable or broken file lets every job through.
A site with functions of its own calls pollux_submit() and pollux_modify() from them instead (see README.md).

pollux_config:
    gateway             URLs of polluxd's gateways, separated by commas                         (required)
    gateway_ca          file, on every node, of the certificates that vouch for them            (the system's)
    lease_s             seconds that a job is kept back for polluxd, which renews them          (300)
    heartbeat_file      file with the time of polluxd's last sign of life [epoch s], and the cluster's GPUs (no check)
    heartbeat_stale_s   age from which polluxd counts as dead: jobs then start as plain ones    (180)
    log_appends         true where slurm.conf has JobFileAppend=1: output files are never emptied (false)
    trusted_users       list of users that, besides root, may change the geometry of Pollux jobs: polluxd's ({})
    trusted_uids        the same by number, for users who are not in /etc/passwd                ({})

Runs inside slurmctld, under Lua 5.1 to 5.4: no database, no command, one small file read.
]]

-- From the folder of this file, wherever that is.
local folder = string.match(debug.getinfo(1, "S").source, "^@(.*/)") or ""
dofile(folder .. "hostile_text.lua")
dofile(folder .. "admin_comment.lua")
dofile(folder .. "heartbeat.lua")
dofile(folder .. "directives.lua")
dofile(folder .. "companion.lua")
dofile(folder .. "placement_options.lua")

-- What squeue -o %k and scontrol show job tell of a waiting job. Of the fields that a job shows, polluxd as an Operator may
-- change none but Comment, which is the user's: so the words are true as long as the job lives.
local KEPT_BACK = "pollux: while the reason is BeginTime, polluxd keeps the job back; polluxctl explain says why"

local function log_user(format, ...)
  slurm.log_user("%s", string.format(format, ...))
end

local quoted, given = pollux_quoted, pollux_given

local MOST_OPTIONS = 1024 -- of SPANK plugins, of one job
-- Of a job, and CPUs of a GPU; memory of a node [MB]. No machine has as much, and polluxd reads no larger numbers.
local MOST_COUNT, MOST_MEMORY = 65533, 999999999
local LATEST = 99999999999 -- a time of the year 5138

-- Nil for memory that is unset. It has 64 bits, and Lua sees its NO_VAL as a large float.
local function given_memory(value)
  return given(value) and value < 2 ^ 62 and value or nil
end

-- Slurm 25.11 and newer: such a job runs again on its nodes at once after any requeue, before polluxd can place it.
local function expedited(job)
  local bit = slurm.EXPEDITED_REQUEUE
  return bit and math.floor((given(job.bitflags) or 0) / bit) % 2 == 1
end

-- What of sbatch's options an elastic job cannot have --------------------------------------------------------

-- polluxd decides nodes, GPUs per node and tasks at every move, so an option that fixes one of them would
-- either be broken silently or keep the job from starting. Each entry: test, option, what to do instead.
local REFUSED = {
  { function(j) return given(j.het_job_offset) end, "heterogeneous components (':')", "submit one job" },
  -- 0 is --exclusive, 1 is --oversubscribe
  { function(j) return given(j.shared) and j.shared > 1 end, "--exclusive=user or =mcs", "use --exclusive" },
  -- From Slurm 24.11 --cpus-per-task stands in it too, as "cpu=2".
  { function(j) return string.find(given(j.tres_per_task) or "", "gpu", 1, true) end, "--gpus-per-task", "use --gres=gpu:N or --gpus-per-node=N" },
  { function(j) return given(j.tres_per_socket) end, "--gpus-per-socket", "use --gres=gpu:N or --gpus-per-node=N" },
  { function(j) return given(j.ntasks_per_tres) end, "--ntasks-per-gpu", "`pollux run` starts one worker per GPU" },
  { function(j, companion) return j.requeue == 0 and not companion end, "--no-requeue", "move works by requeueing; leave the option out" },
  { expedited, "--requeue=expedite", "leave the option out" },
  { function(j) return given(j.time_min) end, "--time-min", "give --time alone" },
  { function(j) return given(j.deadline) and j.deadline > 0 end, "--deadline", "Slurm would end the job while it waits for GPUs; give --time" },
}

-- The CPUs and the memory that go with each GPU, from what was asked for; or nil and a message.
local function per_gpu(job)
  local nodes = given(job.min_nodes) or 1
  local per_node, per_job = pollux_gpus_asked(job.tres_per_node), pollux_gpus_asked(job.tres_per_job)
  if per_node == false or per_job == false then
    return nil, "ask for GPUs alone (--gres=gpu:N, --gres=gpu:TYPE:N, --gpus-per-node=N or --gpus=N), got "
      .. quoted(given(job.tres_per_node) or given(job.tres_per_job))
  end
  local gpus = per_job or (per_node and per_node * nodes)
  if gpus == 0 then
    return nil, "a Pollux job needs at least one GPU, got a request for 0"
  end
  local asked = gpus or nodes
  local tasks = given(job.num_tasks) or (given(job.ntasks_per_node) or 1) * nodes
  local cpus = math.ceil(tasks * (given(job.cpus_per_task) or 1) / asked)
  local by_tres = given(job.cpus_per_tres) and string.match(job.cpus_per_tres, ":(%d+)$")
  local memory = given_memory(job.min_mem_per_node)
  if asked > MOST_COUNT or (tonumber(by_tres) or cpus) > MOST_COUNT or (memory or 0) > MOST_MEMORY then
    return nil, string.format("a job has at most %d GPUs, %d CPUs per GPU and %d MB of memory per node: ask for less",
      MOST_COUNT, MOST_COUNT, MOST_MEMORY)
  end
  return {
    gpus = gpus,
    cpus = tonumber(by_tres) or cpus,
    -- Otherwise the site's DefCpuPerGPU says how many.
    cpus_asked = (by_tres or given(job.cpus_per_task)) ~= nil,
    -- Otherwise the site's DefMemPerGPU says how much.
    memory_asked = (memory or given_memory(job.min_mem_per_cpu) or given(job.mem_per_tres)) ~= nil,
    -- --mem-per-gpu and --mem-per-cpu follow the size by themselves; --mem=0 means all of a node
    memory = memory and memory > 0 and math.ceil(memory / math.max(math.floor(asked / nodes), 1)) or nil,
  }
end

-- The uids that may change the geometry of Pollux jobs, root aside. Lua cannot ask the name service: only users of this
-- machine's /etc/passwd have names here.
local function trusted(config)
  local uids, names = {}, {}
  for _, uid in ipairs(config.trusted_uids or {}) do
    uids[uid] = true
  end
  for _, name in ipairs(config.trusted_users or {}) do
    names[name] = true
  end
  if next(names) then
    for line in io.lines(config.passwd_file or "/etc/passwd") do
      local name, uid = string.match(line, "^([^:]+):[^:]*:(%d+):")
      if names[name] then
        uids[tonumber(uid)], names[name] = true, nil
      end
    end
  end
  for name in pairs(names) do
    slurm.log_error("pollux: trusted user %s is not in /etc/passwd: name the uid in trusted_uids", name)
  end
  return uids
end

local TRUSTED = trusted(pollux_config or {})

-- The first option of a job that it cannot have is told to the user; nil where there is none.
local function refused_option(job, companion)
  for _, entry in ipairs(REFUSED) do
    if entry[1](job, companion) then
      log_user("#POLLUX: %s cannot be used by a Pollux job: %s", entry[2], entry[3])
      return entry[2]
    end
  end
end

local function submit_companion(job, found, config)
  local now = os.time()
  if not pollux_acts(config, now) then
    log_user("#POLLUX: polluxd does not answer: nobody would place this companion")
    return slurm.ERROR
  end
  local placing, option = pollux_placement_words(job)
  -- It repeats what its parent has, and polluxd places it where the parent may be.
  local stray = given(job.array_inx) and "--array"
  for _, word in ipairs(placing or { option }) do
    if not placing or not string.match(word, "^constraint=") and not string.match(word, "^reservation=") and word ~= "exclusive=yes" then
      stray = stray or word
    end
  end
  if stray then
    log_user("#POLLUX: a companion has none of sbatch's options that name nodes, and no --array, got '%s'", stray)
  end
  if refused_option(job, true) or stray then
    return slurm.ERROR
  end
  local share, problem = per_gpu(job)
  if not share or not share.gpus then
    log_user("#POLLUX: %s", problem or "a companion asks for its GPUs (--gres=gpu:N)")
    return slurm.ERROR
  end
  pollux_mark_companion(job, found, share, now, config.lease_s or 300)
  return slurm.SUCCESS
end

-- The value of sbatch's option --pollux, which the SPANK plugin adds; nil where it was not given; or nil and a message.
-- Slurm's list starts at 0, and is copied as a whole.
local function pollux_option(job)
  if (given(job.spank_job_env_size) or 0) > MOST_OPTIONS then
    return nil, string.format("a job has at most %d options of SPANK plugins, this one has %d", MOST_OPTIONS,
      job.spank_job_env_size)
  end
  local list, index = job.spank_job_env, 0
  while type(list) == "table" and list[index] ~= nil do
    local text = string.match(list[index], "^_SLURM_SPANK_OPTION_pollux_pollux=(.*)$")
    if text then
      return text
    end
    index = index + 1
  end
end

-- A job that is submitted from within a Pollux job inherits its variables, which would make it look like one. Slurm passes
-- all variables of a job, which may be a million, for each that is read or written: so of a plain job two are read.
local function disinherit(environment)
  if given(environment["POLLUX_SUBMITTED"]) then
    for _, name in ipairs({ "POLLUX_GATEWAY", "POLLUX_GATEWAY_CA", "POLLUX_TOKEN", "POLLUX_SEARCH" }) do
      if given(environment[name]) then environment[name] = "" end
    end
  end
end

-- For a site's slurm_job_submit: slurm.SUCCESS, or slurm.ERROR after telling the user why.
function pollux_submit(job, part_list, submit_uid)
  local hostile = pollux_hostile(job)
  if hostile then
    log_user("%s", hostile)
    return slurm.ERROR
  end
  local script = job.script
  if script == nil then
    return slurm.SUCCESS -- salloc, srun: no batch script, so nothing that could be started again
  end
  local option_text, fault = pollux_option(job)
  if fault then
    log_user("%s", fault)
    return slurm.ERROR
  end
  local environment = job.environment or {}
  disinherit(environment)
  local head, companion = pollux_head(script), nil
  companion, fault = pollux_companion(head)
  if companion then
    return submit_companion(job, companion, pollux_config or {})
  elseif companion == false then
    log_user("%s", fault)
    return slurm.ERROR
  end
  local wanted, complaint = pollux_directives(head, given(environment["SBATCH_POLLUX"]), option_text)
  if head.stray then
    log_user("note: the #POLLUX line %d comes after %s and has no effect", head.stray, head.behind)
  end
  if head.mistyped then
    log_user("note: line %d has no effect; did you mean '#POLLUX key=value', from the first column?", head.mistyped)
  end
  if wanted == nil then
    return slurm.SUCCESS
  end
  local config = pollux_config or {}
  if wanted == false then
    log_user("%s", complaint)
    return slurm.ERROR
  end
  if refused_option(job) then
    return slurm.ERROR
  end
  local share, problem = per_gpu(job)
  if not share then
    log_user("#POLLUX: %s", problem)
    return slurm.ERROR
  end
  if share.gpus and wanted["max-gpus"] and wanted["max-gpus"] < share.gpus then
    log_user("note: max-gpus=%d is below the %d GPUs asked for: the job gets at most %d", wanted["max-gpus"], share.gpus,
      wanted["max-gpus"])
  end
  local least, smallest = wanted["min-gpus"] or 1, pollux_least_count(wanted)
  local now = os.time()
  local cluster_gpus = pollux_cluster_gpus(config, now)
  if cluster_gpus and smallest > cluster_gpus then
    local what = smallest == least and "min-gpus=" .. least or "gpu-counts=" .. wanted["gpu-counts"]
    log_user("#POLLUX: %s is above the %d GPUs of this cluster", what, cluster_gpus)
    return slurm.ERROR
  end

  local mode = given(environment["SLURM_OPEN_MODE"])
  if mode == "t" then
    log_user("#POLLUX: --open-mode=truncate cannot be used by a Pollux job: each move would empty its log")
    return slurm.ERROR
  end

  local kinds, mismatch = pollux_gpu_types(job, wanted["gpu-types"])
  if kinds == false then
    log_user("#POLLUX: %s", mismatch)
    return slurm.ERROR
  end
  local placing, option, wrong = pollux_placement_words(job, kinds)
  if not placing then
    log_user("#POLLUX: %s cannot be used by a Pollux job in this form: %s", option, wrong)
    return slurm.ERROR
  end
  if job.shared == 0 then
    wanted["gpu-counts"] = "whole-nodes" -- Slurm gives an exclusive job all GPUs of its nodes
  end

  local begin = given(job.begin_time)
  begin = begin and begin > 0 and begin or nil
  if begin and begin > LATEST then
    log_user("#POLLUX: --begin is %d s after 1970, at most %d is allowed", begin, LATEST)
    return slurm.ERROR
  end
  local fields = { "pollux:v1", "min-gpus=" .. least }
  if wanted["max-gpus"] then
    fields[#fields + 1] = "max-gpus=" .. wanted["max-gpus"]
  end
  if wanted["gpu-counts"] and wanted["gpu-counts"] ~= "any" then
    fields[#fields + 1] = "gpu-counts=" .. wanted["gpu-counts"]
  end
  -- Where the agent only looks on, the batch size is as fixed for polluxd as the user can make it.
  local looks_on = wanted["mode"] == "observe" or wanted["mode"] == "advise"
  fields[#fields + 1] = "adaptive=" .. (looks_on and "no" or wanted["adaptive"] or "yes")
  fields[#fields + 1] = "preemptible=" .. (wanted["preemptible"] or "yes")
  if wanted["continue"] == "yes" then
    fields[#fields + 1] = "continue=yes"
  end
  local loop = pollux_loop(head)
  if loop then
    fields[#fields + 1] = "loop=own"
  end
  if wanted["search"] then
    fields[#fields + 1] = "search=" .. wanted["search"]
    environment["POLLUX_SEARCH"] = wanted["search"]
  end
  fields[#fields + 1] = "cpus-per-gpu=" .. share.cpus
  if share.cpus_asked then
    fields[#fields + 1] = "cpus-asked=yes"
  end
  if share.memory_asked then
    fields[#fields + 1] = "mem-asked=yes"
  end
  if share.memory then
    fields[#fields + 1] = "mem-per-gpu=" .. share.memory
  end
  for _, word in ipairs(placing) do
    fields[#fields + 1] = word
  end
  -- Slurm's own SubmitTime changes at every requeue.
  fields[#fields + 1] = string.format("submitted=%d", now)
  if begin then
    fields[#fields + 1] = string.format("begin=%d", begin)
  end
  -- Without a number of GPUs, --nodes=N and --nodelist of several nodes ask for a GPU of each at least.
  local nodes = given(job.min_nodes) or 1
  local of_node = math.ceil(smallest / nodes)
  fields[#fields + 1] = pollux_asked_size(nodes, share.gpus or of_node * nodes)
  local comment = table.concat(fields, " ")
  if #comment > POLLUX_LONGEST_COMMENT then
    log_user("#POLLUX: the directives and the options that choose nodes have %d bytes together, at most %d are allowed: "
      .. "shorten gpu-types, --constraint, --nodelist or --exclude", #comment, POLLUX_LONGEST_COMMENT)
    return slurm.ERROR
  end
  job.admin_comment = pollux_with_site_text(comment, given(job.admin_comment))

  if not share.gpus then
    -- Slurm writes "gpu:N" into tres_per_node in its own form: "gres:gpu:N" up to 22.05, "gres/gpu:N" from 24.11.
    job.gres = "gpu:" .. of_node
    if nodes == 1 then
      job.tres_per_job = job.tres_per_node
      job.tres_per_node = ""
    end
  end
  if loop == "unseen" then
    log_user("note: the script calls no 'pollux': unless its training attaches by itself, the job stays on its %d GPUs, and "
      .. "polluxd can neither measure nor move it; put 'pollux wrap' before the command that trains", share.gpus or of_node * nodes)
  end
  job.requeue = 1
  -- job_submit/lua of 22.05 cannot set the open mode; sbatch shows it to the job (and here) when it is set.
  if not (mode or config.log_appends) then
    log_user("note: add '#SBATCH --open-mode=append': without it each move empties the output file")
  end
  environment["POLLUX_GATEWAY"] = config.gateway or ""
  environment["POLLUX_GATEWAY_CA"] = config.gateway_ca or ""
  environment["POLLUX_SUBMITTED"] = tostring(now) -- tells this job from others of its id
  -- Read by the agent, which does not ask Slurm; set always, a job submitted from within another inherits that one's.
  environment["POLLUX_ADAPTIVE"] = wanted["adaptive"] or "yes"
  environment["POLLUX_PRIOR"] = wanted["prior"] or "yes"
  environment["POLLUX_MODE"] = wanted["mode"] or (pollux_observes(config, now) and "observe" or "enforce")
  environment["POLLUX_RESIZE"] = wanted["resize"] or "in-place"
  environment["POLLUX_CONTINUE"] = wanted["continue"] or "no"
  -- A lease, not a hold: if polluxd dies, the job starts by itself when the lease lapses.
  if pollux_acts(config, now) then
    job.begin_time = math.max(now, begin or 0) + (config.lease_s or 300)
    job.comment = given(job.comment) or KEPT_BACK
  end
  return slurm.SUCCESS
end

-- What only polluxd and administrators may change on a Pollux job. Each: does this update touch it?
local GUARDED = {
  { "StartTime", function(j) return given(j.begin_time) and j.begin_time > 0 end },
  { "NumNodes", function(j) return given(j.min_nodes) or given(j.max_nodes) end },
  { "ReqNodeList", function(j) return j.req_nodes ~= nil end },
  { "ExcNodeList", function(j) return j.exc_nodes ~= nil end },
  { "TresPerNode", function(j) return j.tres_per_node ~= nil end },
  { "TresPerJob", function(j) return j.tres_per_job ~= nil end },
  { "TresPerTask", function(j) return j.tres_per_task ~= nil end },
  { "TresPerSocket", function(j) return j.tres_per_socket ~= nil end },
  { "NumTasks", function(j) return given(j.num_tasks) end },
  { "NumCPUs", function(j) return given(j.min_cpus) or given(j.max_cpus) end },
  { "MinCPUsNode", function(j) return given(j.pn_min_cpus) end },
  { "MinMemory", function(j) return given_memory(j.min_mem_per_node) or given_memory(j.min_mem_per_cpu) end },
  { "CPUsPerTask", function(j) return given(j.cpus_per_task) end },
  { "CpusPerTres", function(j) return j.cpus_per_tres ~= nil end },
  { "MemPerTres", function(j) return j.mem_per_tres ~= nil end },
  { "TasksPerNode", function(j) return given(j.ntasks_per_node) end },
  { "Features", function(j) return given(j.features) end },
  { "OverSubscribe", function(j) return given(j.shared) end },
  { "Partition", function(j) return j.partition ~= nil end },
  -- Else a user could have Slurm refuse a start in the name of another QOS or account.
  { "QOS", function(j) return given(j.qos) end },
  { "Account", function(j) return given(j.account) end },
  { "Reservation", function(j) return j.reservation ~= nil end },
  { "Licenses", function(j) return j.licenses ~= nil end },
  { "MinTmpDiskNode", function(j) return given(j.pn_min_tmp_disk) end },
  { "Switches", function(j) return given(j.req_switch) end },
  { "TimeMin", function(j) return given(j.time_min) end },
  { "Deadline", function(j) return given(j.deadline) and j.deadline > 0 end },
  { "JobName", function(j) return j.name ~= nil end },
  { "Requeue", function(j, record) return j.requeue == (pollux_is_companion(record) and 1 or 0) end },
  { "AdminComment", function(j) return j.admin_comment ~= nil end },
}

-- For a site's slurm_job_modify. The user who is refused sees "Unspecified error": Slurm 22.05 drops log_user
-- here, so the reason goes to slurmctld's log too.
function pollux_modify(update, record, part_list, modify_uid)
  local hostile = modify_uid ~= 0 and pollux_hostile(update)
  if hostile then
    slurm.log_info("pollux: update of job %s refused to uid %s: %s", tostring(record.job_id), tostring(modify_uid), hostile)
    slurm.log_user("%s", hostile)
    return slurm.ERROR
  end
  if not string.match(record.admin_comment or "", "^pollux:") then
    return slurm.SUCCESS
  end
  if modify_uid == 0 or TRUSTED[modify_uid] then
    pollux_keep_mark(update, record)
    return slurm.SUCCESS
  end
  for _, entry in ipairs(GUARDED) do
    if entry[2](update, record) then
      local text = string.format("pollux: %s of job %s is polluxd's to change", entry[1], tostring(record.job_id))
      slurm.log_info("%s (refused to uid %s)", text, tostring(modify_uid))
      slurm.log_user("%s", text)
      return slurm.ERROR
    end
  end
  return slurm.SUCCESS
end

slurm_job_submit = slurm_job_submit or pollux_submit
slurm_job_modify = slurm_job_modify or pollux_modify

return slurm.SUCCESS
