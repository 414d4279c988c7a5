--[[
The part of Pollux' submission hook that is about sbatch options which choose nodes; job_submit.lua runs this file.

polluxd chooses a job's nodes among those that these options allow. What the user wrote goes into AdminComment, because
each move writes another ReqNodeList, and another number and type of GPUs, into the job.
]]

local NO_VAL16, NO_VAL = 65534, 4294967294
local LONGEST_TEXT, LONGEST_TYPE = 512, 64
-- polluxd reads at most nine digits.
local MOST = 999999999

-- Nil for what sbatch leaves unset: Slurm says that with NO_VAL, NO_VAL16 or an empty string.
function pollux_given(value)
  if value == nil or value == "" or value == NO_VAL16 or value == NO_VAL then
    return nil
  end
  return value
end

local given = pollux_given

-- One expression without parentheses: names joined by "&" alone, or by "|" alone.
local function one_level(text)
  local joined = string.find(text, "&", 1, true) and string.find(text, "|", 1, true)
  return text ~= "" and not joined and not string.find(text, "[^%w_.:+&|-]") and not string.find("&" .. text .. "&", "[&|][&|]")
end

-- Nil where polluxd can read the features; else what is wrong.
local function bad_features(text)
  if string.find(text, "[%[%]*]") then
    return "counts of nodes cannot be kept over moves; use names with & or |"
  end
  local inside = true
  local outside = string.gsub(text, "%((.-)%)", function(part)
    inside = inside and one_level(part)
    return "x"
  end)
  if not inside or not one_level(outside) then
    return "use names with & or |, such as a100&ib or (a100|h100)&ib"
  end
end

local function bad_names(text)
  if not string.match(text, "^[%w_.,%[%]-]+$") then
    return "use node names, such as n1 or n[1-4]"
  end
end

local function bad_reservation(text)
  if not string.match(text, "^[%w_.-]+$") then
    return "name one reservation"
  end
end

-- The number of an array's tasks that may run at one time, from "0-11%4".
local function array_limit(text)
  return string.match(text, "%%(%d+)$")
end

-- sbatch itself raises the least to --cpus-per-task, which follows the job's size.
local function min_cpus(job)
  local least = given(job.pn_min_cpus)
  return least and least > (given(job.cpus_per_task) or 1) and least
end

-- Each: the value of a job, sbatch's option, the word in AdminComment, and what is wrong with the value (or nil).
local OPTIONS = {
  { function(j) return given(j.features) end, "--constraint", "constraint", bad_features },
  { function(j) return given(j.req_nodes) end, "--nodelist", "nodelist", bad_names },
  { function(j) return given(j.exc_nodes) end, "--exclude", "exclude", bad_names },
  { function(j) return given(j.reservation) end, "--reservation", "reservation", bad_reservation },
  { function(j) return j.shared == 0 and "yes" end, "--exclusive", "exclusive" },
  { function(j) return given(j.array_inx) and array_limit(j.array_inx) end, "--array", "array-limit" },
  { function(j) return min_cpus(j) end, "--mincpus", "min-cpus" },
  { function(j) return given(j.pn_min_tmp_disk) and j.pn_min_tmp_disk > 0 and j.pn_min_tmp_disk end, "--tmp", "tmp" },
  { function(j) return given(j.req_switch) and j.req_switch > 0 and j.req_switch end, "--switches", "switches" },
  { function(j) return given(j.contiguous) and j.contiguous ~= 0 and "yes" end, "--contiguous", "contiguous" },
}

-- The words of AdminComment; or nil, the option and what to do instead.
function pollux_placement_words(job, gpu_types)
  local words = {}
  if gpu_types then
    words[1] = "gpu-types=" .. gpu_types
  end
  for _, entry in ipairs(OPTIONS) do
    local value, option, word, bad = entry[1](job), entry[2], entry[3], entry[4]
    if value then
      local text = type(value) == "number" and string.format("%d", value) or value
      local wrong = #text > LONGEST_TEXT and "the text has " .. #text .. " bytes, at most " .. LONGEST_TEXT .. " are allowed"
        or not bad and (tonumber(text) or 0) > MOST and "the number is above " .. MOST
        or bad and bad(text)
      if wrong then
        return nil, option, wrong
      end
      words[#words + 1] = word .. "=" .. text
    end
  end
  return words
end

-- "gres:gpu:2", "gres/gpu:a100:2", "gpu" -> count and type (or nil). Nil where no GPU is asked; false where another
-- resource is named too: polluxd's updates would lose it.
function pollux_gpus_asked(text)
  if not given(text) then
    return nil
  end
  local rest = string.match(text, "^gres[:/]gpu(.*)$") or string.match(text, "^gpu(.*)$")
  if not rest then
    return false
  end
  if rest == "" then
    return 1
  end
  local kind, count = string.match(rest, "^:(%w[%w_.+-]*):(%d+)$")
  if kind then
    return tonumber(count), kind
  end
  count = string.match(rest, "^:(%d+)$")
  if count then
    return tonumber(count)
  end
  kind = string.match(rest, "^:(%w[%w_.+-]*)$")
  if kind then
    return 1, kind
  end
  return false
end

-- The types that the job may use: those of gpu-types=, else the one that --gres names. False and what is wrong where
-- --gres names another than gpu-types.
function pollux_gpu_types(job, allowed)
  for _, text in ipairs({ job.tres_per_node or "", job.tres_per_job or "" }) do
    local _, kind = pollux_gpus_asked(text)
    if kind and #kind > LONGEST_TYPE then
      return false, "--gres names a GPU type of " .. #kind .. " characters, at most " .. LONGEST_TYPE .. " are allowed"
    elseif kind and not allowed then
      return kind
    elseif kind and not string.find("," .. allowed .. ",", "," .. kind .. ",", 1, true) then
      return false, "--gres asks for '" .. kind .. "', which gpu-types=" .. allowed .. " leaves out"
    end
  end
  return allowed
end
