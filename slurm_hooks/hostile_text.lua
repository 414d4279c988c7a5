--[[
The part of Pollux' submission hook that looks at free text of all jobs, Pollux' or not; job_submit.lua runs this file.

Slurm prints a job's name as it is, line breaks included, in front of the fields of its record. polluxd does not read such
records; site scripts and people do. So no job may have control characters in its free text, or a name or comment that
looks like a field of `scontrol show job`.
]]

-- The bytes of a script that the hook reads; slurmctld waits for the hook.
POLLUX_SCRIPT_BYTES = 65536

local TEXTS = { "name", "comment", "wckey", "work_dir", "std_in", "std_out", "std_err" }
local LOOKS_LIKE_A_FIELD = { name = true, comment = true, wckey = true }

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

-- A message for the user where the free text of a job, or of an update of one, is refused; else nil.
function pollux_hostile(job)
  for _, field in ipairs(TEXTS) do
    local text = job[field]
    if type(text) == "string" then
      -- Bytes 194 128 to 194 159 are the control characters of Unicode above 127.
      if string.find(text, "[\1-\31\127]") or string.find(text, "\194[\128-\159]") then
        return field .. " holds a control character, such as a line break: leave it out"
      end
      if LOOKS_LIKE_A_FIELD[field] then
        local key = field_in(text)
        if key then
          return field .. " holds '" .. key .. "=', which looks like a field of `scontrol show job`: leave it out"
        end
      end
    end
  end
end

-- The part of a script that the hook reads.
function pollux_head(script)
  return string.sub(script, 1, POLLUX_SCRIPT_BYTES)
end
