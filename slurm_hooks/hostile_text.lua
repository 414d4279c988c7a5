--[[
The part of Pollux' submission hook that looks at free text of all jobs, Pollux' or not; job_submit.lua runs this file.

Slurm prints a job's name as it is, line breaks included, in front of the fields of its record. polluxd does not read such
records; site scripts and people do. So no job may have control characters in its free text, or a name or comment that
looks like a field of `scontrol show job`.

slurmctld waits for the hook, and a user may send a text of a gigabyte. So the length of a text is compared before anything
looks at its content, for each field that the hook reads, or that squeue shows to polluxd.
]]

-- The bytes of a script that the hook reads; slurmctld waits for the hook.
POLLUX_SCRIPT_BYTES = 65536

-- The part of a text that a message repeats [bytes].
local QUOTED_BYTES = 200

-- The longest texts [bytes]. Slurm has the same bounds, and applies them after the hook. Each: the fields, the bound, whether control characters are refused, and whether names of fields are.
local TEXTS = {
  { { "name", "comment", "wckey" }, 1024, true, true },
  { { "work_dir", "std_in", "std_out", "std_err" }, 4096, true, false },
  { { "partition", "account", "qos", "reservation", "licenses", "features", "tres_per_node", "tres_per_job", "tres_per_task",
      "tres_per_socket", "cpus_per_tres", "mem_per_tres" }, 1024, false, false },
  { { "array_inx" }, 4096, false, false },
  { { "req_nodes", "exc_nodes" }, 8192, false, false },
}

local FIELDS = {}
for word in string.gmatch([[
  JobId ArrayJobId ArrayTaskId HetJobId JobName UserId GroupId MCS_label Priority Account QOS JobState Reason Dependency
  Requeue Restarts BatchFlag ExitCode RunTime TimeLimit TimeMin SubmitTime EligibleTime StartTime EndTime Deadline
  Partition ReqNodeList ExcNodeList NodeList SchedNodeList BatchHost NumNodes NumCPUs NumTasks TRES ReqTRES AllocTRES
  JOB_GRES Nodes CPU_IDs GRES MinCPUsNode MinMemoryNode MinMemoryCPU Features Reservation OverSubscribe Licenses Network
  Command WorkDir AdminComment SystemComment Comment TresPerJob TresPerNode TresPerTask NodeName Gres GresUsed State
  PartitionName ReservationName]], "%S+") do
  FIELDS[word] = true
end

local LONGEST_FIELD = 32

-- The message about a text that is longer than `longest` bytes.
function pollux_too_long(field, text, longest)
  return string.format("%s has %d bytes, at most %d are allowed: shorten it", field, #text, longest)
end

-- A user's text as a message repeats it.
function pollux_quoted(text)
  return "'" .. (#text > QUOTED_BYTES and string.sub(text, 1, QUOTED_BYTES) .. "..." or text) .. "'"
end

-- The first name of a field before an equals sign; nil where there is none. slurmctld waits for this hook: the time grows
-- with the length of the text, and not with its square, as that of one pattern for both would.
local function field_in(text)
  local at = string.find(text, "=", 1, true)
  while at do
    local key = string.match(string.sub(text, math.max(1, at - LONGEST_FIELD), at - 1), "%a[%w_]*$")
    if FIELDS[key or ""] then
      return key
    end
    at = string.find(text, "=", at + 1, true)
  end
end

-- What is wrong with one text; nil where nothing is.
local function wrong(field, text, longest, no_controls, no_fields)
  if type(text) ~= "string" then
    return nil
  end
  if #text > longest then
    return pollux_too_long(field, text, longest)
  end
  -- Bytes 194 128 to 194 159 are the control characters of Unicode above 127.
  if no_controls and (string.find(text, "[\1-\31\127]") or string.find(text, "\194[\128-\159]")) then
    return field .. " holds a control character, such as a line break: leave it out"
  end
  local key = no_fields and field_in(text)
  if key then
    return field .. " holds '" .. key .. "=', which looks like a field of `scontrol show job`: leave it out"
  end
end

-- A message for the user where the free text of a job, or of an update of one, is refused; else nil.
function pollux_hostile(job)
  for _, kind in ipairs(TEXTS) do
    for _, field in ipairs(kind[1]) do
      local problem = wrong(field, job[field], kind[2], kind[3], kind[4])
      if problem then
        return problem
      end
    end
  end
end
