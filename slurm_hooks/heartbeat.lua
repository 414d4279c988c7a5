--[[
The part of Pollux' submission hook that asks whether polluxd lives; job_submit.lua runs this file.

polluxd touches one of two files in every cycle: `heartbeat_file` in mode enforce, and the same name with `.observe` after
it in mode observe. The first line is the time [epoch s], the second the number of GPUs of the cluster.
]]

-- True and the number of GPUs (nil where the file has none) while polluxd lives.
local function fresh(name, config, now)
  local file = io.open(name, "r")
  if not file then
    return false
  end
  local beat, gpus = tonumber(file:read("*l") or ""), tonumber(file:read("*l") or "")
  file:close()
  return beat ~= nil and now - beat <= (config.heartbeat_stale_s or 180), gpus
end

-- Whether polluxd lives and acts on Pollux jobs; true where no file says.
function pollux_acts(config, now)
  return not config.heartbeat_file or fresh(config.heartbeat_file, config, now)
end

-- Whether polluxd only observes. The agents then change nothing in trainings either, unless the user asks for it.
function pollux_observes(config, now)
  return config.heartbeat_file ~= nil and not pollux_acts(config, now)
    and fresh(config.heartbeat_file .. ".observe", config, now)
end

-- The GPUs of the cluster; nil where polluxd does not say.
function pollux_cluster_gpus(config, now)
  for _, ending in ipairs(config.heartbeat_file and { "", ".observe" } or {}) do
    local lives, gpus = fresh(config.heartbeat_file .. ending, config, now)
    if lives and gpus and gpus > 0 then
      return gpus
    end
  end
end
