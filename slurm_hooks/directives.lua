--[[
The part of Pollux' submission hook that reads `#POLLUX key=value` lines; job_submit.lua runs this file.
]]

local KEYS = { "min-gpus", "max-gpus", "gpu-counts", "adaptive", "preemptible", "prior", "mode", "resize" }

local function quoted(text)
  return "'" .. text .. "'"
end

local function gpu_count(text)
  local count = string.match(text, "^%d+$") and tonumber(text)
  if count and count >= 1 and count <= 65533 then
    return count
  end
  return nil, "a whole number of GPUs from 1 up"
end

-- A reader of one of the words that `allowed` has, as in "yes or no", "observe, advise or enforce".
local function one_of(allowed)
  local known = {}
  for word in string.gmatch(allowed, "[%w-]+") do
    known[word] = word ~= "or" or nil
  end
  return function(text)
    if known[text] then
      return text
    end
    return nil, allowed
  end
end

local COUNT_RULES = { ["any"] = true, ["powers-of-two"] = true, ["whole-nodes"] = true }

-- A rule by name, or the counts themselves: ascending and each once, as polluxd reads them.
local function gpu_counts(text)
  local allowed = "any, powers-of-two, whole-nodes, or a list of counts such as 1,2,4,8"
  if COUNT_RULES[text] then
    return text
  end
  local counts, seen = {}, {}
  for word in string.gmatch(text .. ",", "([^,]*),") do
    local count = gpu_count(word)
    if not count or #counts >= 64 then
      return nil, allowed
    end
    if not seen[count] then
      counts[#counts + 1], seen[count] = count, true
    end
  end
  table.sort(counts)
  return table.concat(counts, ",")
end

local READERS = {
  ["min-gpus"] = gpu_count,
  ["max-gpus"] = gpu_count,
  ["gpu-counts"] = gpu_counts,
  ["adaptive"] = one_of("yes or no"),
  ["preemptible"] = one_of("yes or no"),
  ["prior"] = one_of("yes or no"),
  ["mode"] = one_of("observe, advise or enforce"),
  ["resize"] = one_of("in-place, relaunch or requeue"),
}

-- The smallest number of GPUs that the directives allow; nil where they contradict each other. How many GPUs whole
-- nodes have, only polluxd knows.
function pollux_least_count(found)
  local rule, least, most = found["gpu-counts"] or "any", found["min-gpus"] or 1, found["max-gpus"] or math.huge
  local count = nil
  if rule == "any" or rule == "whole-nodes" then
    count = least
  elseif rule == "powers-of-two" then
    count = 1
    while count < least do
      count = count * 2
    end
  else
    for word in string.gmatch(rule, "%d+") do
      if not count and tonumber(word) >= least then
        count = tonumber(word)
      end
    end
  end
  return count and count <= most and count or nil
end

-- "#pollux min-gpus=2", "# POLLUX min-gpus=2", "#POLLUX: min-gpus=2", "#pollux": a directive in all but the letter.
-- Not "##POLLUX min-gpus=2", by which people take a line out, nor prose about Pollux.
local function almost(line)
  local rest = string.match(string.upper(line), "^%s*#%s*POLLUX(.*)$")
  if not rest then
    return false
  end
  local key = string.match(rest, "^[%s:,]*([%w-]+)%s*=")
  return (key ~= nil and READERS[string.lower(key)] ~= nil) or string.match(string.upper(line), "^%s*#POLLUX%s*$") ~= nil
end

-- Reads the #POLLUX lines among the comments that head a batch script, where sbatch reads its own #SBATCH.
-- Returns nil when there is none; else the values by key; or false and a message for the user.
-- A third value is the number of the first #POLLUX line after the head, where it has no effect; a fourth that of the
-- first line of the head that was meant as one and is none.
function pollux_directives(script)
  local found, head, number, stray, mistyped = nil, true, 0, nil, nil
  local line_of = {}
  for line in string.gmatch(script .. "\n", "(.-)\r?\n") do
    number = number + 1
    if head and string.match(line, "^%s*[^#%s]") then
      head = false
    end
    local rest = string.match(line, "^#POLLUX$") and "" or string.match(line, "^#POLLUX%s(.*)$")
    if rest and not head then
      stray = stray or number
    elseif head and not rest and almost(line) then
      mistyped = mistyped or number
    elseif rest then
      found = found or {}
      for word in string.gmatch(rest, "%S+") do
        local where = string.format("#POLLUX line %d: ", number)
        if string.sub(word, 1, 1) == "#" then
          break -- a comment to the end of the line
        end
        local key, text = string.match(word, "^([^=]+)=(.*)$")
        if not key then
          return false, where .. "expected key=value, got " .. quoted(word) .. " (keys: " .. table.concat(KEYS, ", ") .. ")"
        end
        local read = READERS[key]
        if not read then
          return false, where .. "unknown key " .. quoted(key) .. " (allowed: " .. table.concat(KEYS, ", ") .. ")"
        end
        if found[key] ~= nil then
          return false, string.format("%skey '%s' is given twice (first on line %d)", where, key, line_of[key])
        end
        local value, allowed = read(text)
        if value == nil then
          return false, where .. "bad value " .. quoted(text) .. " for " .. key .. " (allowed: " .. allowed .. ")"
        end
        found[key], line_of[key] = value, number
      end
    end
  end
  if found and found["min-gpus"] and found["max-gpus"] and found["min-gpus"] > found["max-gpus"] then
    return false, string.format(
      "#POLLUX line %d: min-gpus=%d is above max-gpus=%d",
      math.max(line_of["min-gpus"], line_of["max-gpus"]), found["min-gpus"], found["max-gpus"])
  end
  if found and found["gpu-counts"] and not pollux_least_count(found) then
    return false, string.format(
      "#POLLUX line %d: no count of gpu-counts=%s is within min-gpus=%d and max-gpus=%s",
      line_of["gpu-counts"], found["gpu-counts"], found["min-gpus"] or 1, found["max-gpus"] or "any")
  end
  return found, nil, stray, mistyped
end
