--[[
The part of Pollux' submission hook that is about companion jobs; job_submit.lua runs this file.

A companion is a worker-only job by which a running job of the same user grows in place. The job's own agent submits it,
with the line

    #POLLUX companion-of=JOB attempt=RESTARTS move=ID nonce=HEX

as its only directive. What that says is the user's word: polluxd compares it with the job that it names, and the nonce
with the nonce of its order, and ends a companion that nobody asked for. So this file checks the form of the line, and
makes the companion wait for polluxd.
]]

-- The line's values as text; nil where the script's head has no such line; or false and a message.
function pollux_companion(head)
  local found = nil
  for _, line in ipairs(head.lines) do
    local text = string.match(line[2], "^%s*(.*)$")
    if string.find(text, "companion-of", 1, true) then
      local job, attempt, move, nonce = string.match(
        text, "^companion%-of=(%d+) attempt=(%d+) move=(%d+) nonce=([0-9a-f]+)%s*$")
      if not job or #job > 15 or #attempt > 15 or #move > 15 or #nonce ~= 32 then
        return false, string.format(
          "#POLLUX line %d: a companion has companion-of=JOB attempt=RESTARTS move=ID nonce=HEX, got %s", line[1], pollux_quoted(text))
      end
      found = { job = job, attempt = attempt, move = move, nonce = nonce }
    end
  end
  if found and #head.lines > 1 then
    return false, "#POLLUX: a companion has no other directive than the line that says whose it is"
  end
  return found
end

-- Makes the job description one of a companion; `share` is what goes with each of its GPUs, `now` the time.
function pollux_mark_companion(job, found, share, now, lease_s)
  local fields = {
    "pollux:v1", "companion-of=" .. found.job, "attempt=" .. found.attempt, "move=" .. found.move,
    "nonce=" .. found.nonce, "cpus-per-gpu=" .. share.cpus,
  }
  if share.memory then
    fields[#fields + 1] = "mem-per-gpu=" .. share.memory
  end
  fields[#fields + 1] = string.format("submitted=%d", now)
  job.admin_comment = pollux_with_site_text(table.concat(fields, " "), job.admin_comment)
  job.requeue = 0 -- it dies with its parent's attempt
  job.begin_time = now + lease_s
end

-- True for the record of a companion, whose user must not make it one that Slurm starts again by itself.
function pollux_is_companion(record)
  return string.match(record.admin_comment or "", "^pollux:v1 companion%-of=") ~= nil
end
