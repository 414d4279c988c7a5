--[[
Read a job's Pollux directives: `#POLLUX key=value` lines, SBATCH_POLLUX and --pollux. job_submit.lua runs this file.
]]

local KEYS = { "min-gpus", "max-gpus", "gpu-counts", "gpu-types", "adaptive", "preemptible", "prior", "mode", "resize", "continue", "search" }

-- Bytes of a #POLLUX line, of SBATCH_POLLUX and of --pollux, of one GPU type, and of all of a job's types. polluxd has the last two as well.
local LONGEST_SOURCE, LONGEST_TYPE, LONGEST_TYPES = 1024, 64, 512

-- Lines of a script's head, bytes at the start of a line by which it is known, and letters that are compared to guess what
-- a word was meant to be. Each bounds what the hook costs on any script.
local MOST_LINES, LONGEST_START, MOST_LETTERS = 1000, 96, 4000

local quoted = pollux_quoted

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
  local allowed = "any, powers-of-two, whole-nodes, multiples-of-8 (from 1 to 64), or a list of counts such as 1,2,4,8"
  local replica = string.match(text, "^multiples%-of%-([1-9]%d?)$")
  if COUNT_RULES[text] or (replica and tonumber(replica) <= 64) then
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

-- Types as slurm.conf names them: each once, in order.
local function gpu_types(text)
  if #text > LONGEST_TYPES then
    return nil, "a list of GPU types such as a100,h100, of at most 512 characters"
  end
  local kinds, seen = {}, {}
  for word in string.gmatch(text .. ",", "([^,]*),") do
    if #word > LONGEST_TYPE or not string.match(word, "^%w[%w_.+-]*$") or #kinds >= 16 then
      return nil, "a list of GPU types such as a100,h100: at most 16, each of at most 64 characters"
    end
    if not seen[word] then
      kinds[#kinds + 1], seen[word] = word, true
    end
  end
  table.sort(kinds)
  return table.concat(kinds, ",")
end

-- Of a file that the agent writes, too.
local function search(text)
  if #text <= 64 and string.match(text, "^%w[%w._-]*$") then
    return text
  end
  return nil, "a name of at most 64 letters, digits, dots, dashes and underscores"
end

local READERS = {
  ["min-gpus"] = gpu_count,
  ["max-gpus"] = gpu_count,
  ["gpu-counts"] = gpu_counts,
  ["gpu-types"] = gpu_types,
  ["adaptive"] = one_of("yes or no"),
  ["preemptible"] = one_of("yes or no"),
  ["prior"] = one_of("yes or no"),
  ["mode"] = one_of("observe, advise or enforce"),
  ["resize"] = one_of("in-place or requeue"),
  ["continue"] = one_of("yes or no"),
  ["search"] = search,
}

-- The smallest number of GPUs that the directives allow; nil where they contradict each other. How many GPUs whole
-- nodes have, only polluxd knows.
function pollux_least_count(found)
  local rule, least, most = found["gpu-counts"] or "any", found["min-gpus"] or 1, found["max-gpus"] or math.huge
  local count, replica = nil, string.match(rule, "^multiples%-of%-(%d+)$")
  if replica then
    count = math.ceil(least / replica) * replica
  elseif rule == "any" or rule == "whole-nodes" then
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

-- Letters that are still compared for this job's sake. The guesses what a word was meant to be are a courtesy: where it is
-- used up, there are no more of them.
local letters_left = 0

-- Insertions, deletions and replacements of letters between two short words.
local function distance(a, b)
  letters_left = letters_left - #a * #b
  if letters_left < 0 then
    return math.huge
  end
  local row = {}
  for j = 0, #b do
    row[j] = j
  end
  for i = 1, #a do
    local before = row[0]
    row[0] = i
    for j = 1, #b do
      local replaced = before + (string.byte(a, i) == string.byte(b, j) and 0 or 1)
      before = row[j]
      row[j] = math.min(replaced, row[j] + 1, row[j - 1] + 1)
    end
  end
  return row[#b]
end

-- The key that a word stands for: "min_gpus", "--min-gpus", "Max-GPU"; nil where none is near.
local function meant_key(word)
  local best, nearest = nil, 3
  word = string.gsub(string.gsub(string.lower(string.sub(word, 1, 24)), "_", "-"), "^%-+", "")
  for _, key in ipairs(KEYS) do
    local apart = distance(word, key)
    if apart < nearest then
      best, nearest = key, apart
    end
  end
  return best
end

-- "#pollux min-gpus=2", "# POLLUX min-gpus=2", "#POLLUX: min-gpus=2", "#pollux": a directive in all but the letter.
-- Not "##POLLUX min-gpus=2", by which people take a line out, nor prose about Pollux. `start` is the start of a line.
local function almost(start)
  local upper = string.upper(start)
  local rest = string.match(upper, "^%s*#%s*POLLUX(.*)$")
  if not rest then
    local word, tail = string.match(start, "^#(%u+)%s*(.*)$")
    if not word or word == "SBATCH" or #word > 8 or distance(word, "POLLUX") > 2 then
      return false
    end
    local key = string.match(tail, "^([%w_-]+)%s*=")
    return tail == "" or (key ~= nil and meant_key(key) ~= nil)
  end
  local key = string.match(rest, "^[%s:,]*([%w-]+)%s*=")
  return (key ~= nil and READERS[string.lower(key)] ~= nil) or string.match(upper, "^%s*#POLLUX%s*$") ~= nil
end

-- "#POLLUX line 4" and "#POLLUX line 5" are one source.
local function family(where)
  return string.match(where, "^#POLLUX") or where
end

-- Reads "key=value ..." into `found`; `where` names the source for messages, such as "#POLLUX line 4". `sources` keeps
-- the source of each key: a key is given once per source, and a later source replaces an earlier one's value.
-- Returns a message for the user where a word is wrong.
local function read_words(text, where, found, sources)
  if #text > LONGEST_SOURCE then
    return pollux_too_long(where, text, LONGEST_SOURCE)
  end
  local words = string.gsub(text, "%s#.*$", "") .. " "
  if string.find(words, "%S%s+=") or string.find(words, "=%s+[^%s=]+%s") then
    return where .. ": write key=value without spaces around the =, got " .. quoted(text)
  end
  for word in string.gmatch(text, "%S+") do
    if string.sub(word, 1, 1) == "#" then
      return nil -- a comment to the end of the line
    end
    local key, value = string.match(word, "^([^=]+)=(.*)$")
    if not key then
      return where .. ": expected key=value, got " .. quoted(word) .. " (keys: " .. table.concat(KEYS, ", ") .. ")"
    end
    local read = READERS[key]
    if not read then
      local meant = meant_key(key)
      return where .. ": unknown key " .. quoted(key) .. (meant and ", did you mean " .. meant .. "?" or "")
        .. " (allowed: " .. table.concat(KEYS, ", ") .. ")"
    end
    if sources[key] and family(sources[key]) == family(where) then
      return string.format("%s: key '%s' is given twice (first: %s)", where, key, sources[key])
    end
    local accepted, allowed = read(value)
    if accepted == nil and string.find(value, ",[%w-]+=") then
      return where .. ": separate directives by spaces, not by commas, got " .. quoted(word)
    elseif accepted == nil then
      return where .. ": bad value " .. quoted(value) .. " for " .. key .. " (allowed: " .. allowed .. ")"
    end
    found[key], sources[key] = accepted, where
  end
end

-- What the hook reads of a batch script. slurmctld waits for it, so it takes one step forward a line, for a bounded number
-- of lines, and looks at the starts of lines only; patterns that go back over a text see no user's line but a short one.
--
-- `lines`: the #POLLUX lines among the comments that head the script, where sbatch reads its own #SBATCH lines: a list of
-- { number, text }; `stray`: the number of the first #POLLUX line after the head, where it has no effect; `behind`: what
-- the head ends with; `mistyped`: the number of the first line of the head that looks like a directive and is none.
function pollux_head(script)
  local text = string.sub(script, 1, POLLUX_SCRIPT_BYTES) .. "\n"
  local head, at, number = { text = text, lines = {}, behind = "the first command of the script" }, 1, 0
  letters_left = MOST_LETTERS
  while at <= #text do
    local first, stop = string.find(text, "[^ \t\r\v\f]", at), string.find(text, "\n", at, true)
    if first < stop and string.byte(text, first) ~= 35 then -- "#"
      break
    elseif number == MOST_LINES then
      head.behind = "line " .. MOST_LINES
      break
    end
    number = number + 1
    local start = string.sub(text, at, math.min(stop - 1, at + LONGEST_START - 1))
    if string.find(start, "^#POLLUX%s") or start == "#POLLUX" then
      local last = string.byte(text, stop - 1) == 13 and stop - 2 or stop - 1 -- "\r"
      head.lines[#head.lines + 1] = { number, string.sub(text, at + 8, last) }
    elseif first < stop and not head.mistyped and almost(start) then
      head.mistyped = number
    end
    at = stop + 1
  end
  -- The line break before a line belongs to what is found.
  local stray = string.find(text, "\n#POLLUX%s", math.max(at - 1, 1))
  if stray then
    local _, breaks = string.gsub(string.sub(text, at, stray), "\n", "")
    head.stray = number + breaks + 1
  end
  return head
end

-- How the script trains, by its lines without their comments: "own" where it calls `pollux wrap`, "unseen" where it calls
-- no `pollux` at all; else nil. `head`: of `pollux_head`. Each pattern passes each byte twice at most.
function pollux_loop(head)
  if not string.find(head.text, "pollux", 1, true) or not string.find(head.text, "\n[^#\n]*pollux") then
    return "unseen"
  end
  return string.find(head.text, "\n[^#\n]*pollux[ \t]+wrap[^%w]") and "own" or nil
end

-- What contradicts itself among the directives; nil where nothing does.
local function contradiction(found, sources)
  local least, most = found["min-gpus"], found["max-gpus"]
  if least and most and least > most then
    return string.format("%s: min-gpus=%d is above max-gpus=%d (%s)", sources["min-gpus"], least, most, sources["max-gpus"])
  end
  if found["gpu-counts"] and not pollux_least_count(found) then
    return string.format(
      "%s: no count of gpu-counts=%s is within min-gpus=%d and max-gpus=%s",
      sources["gpu-counts"], found["gpu-counts"], least or 1, most or "any")
  end
end

-- The directives of a job, from three sources: the #POLLUX lines of its script, the variable SBATCH_POLLUX of the
-- submitter's environment, and sbatch's option --pollux (`text` of each, or nil). A later source wins, key by key. The
-- text "yes" opts in with the defaults; "no" makes a plain job of a script with #POLLUX lines.
-- Returns nil for a plain job; else the values by key; or false and a message for the user.
function pollux_directives(head, environment, option)
  local found, sources = nil, {}
  for _, line in ipairs(head.lines) do
    found = found or {}
    local complaint = read_words(line[2], "#POLLUX line " .. line[1], found, sources)
    if complaint then
      return false, complaint
    end
  end
  for _, source in ipairs({ { "SBATCH_POLLUX", environment }, { "--pollux", option } }) do
    local where, text = source[1], source[2]
    if text == "no" then
      found, sources = nil, {}
    elseif text == "" then
      return false, where .. ": expected key=value, or yes, or no, got nothing"
    elseif text ~= nil then
      found = found or {}
      local complaint = text ~= "yes" and read_words(text, where, found, sources)
      if complaint then
        return false, complaint
      end
    end
  end
  local problem = found and contradiction(found, sources)
  if problem then
    return false, problem
  end
  return found
end
