--[[
Pollux' filter for sbatch (cli_filter/lua): a Pollux job appends to its output file and has no deadline.

Slurm empties the output file of a job that starts again after a requeue, unless it was submitted with
--open-mode=append. slurmctld's job_submit/lua cannot set that on 22.05; the client side can. Runs in the user's own
sbatch. A site's cli_filter.lua runs this file with dofile; one that has functions of its own calls
pollux_pre_submit() from slurm_cli_pre_submit. What this cannot see (a script on standard input, a client without this
filter) the submission hook points out.
]]

-- True when the comments that head the script, where sbatch reads its #SBATCH lines, have a #POLLUX line.
local function opts_in(path)
  local file = io.open(path, "r")
  if not file then
    return false
  end
  local found = false
  -- As much as the submission hook reads.
  for line in string.gmatch((file:read(65536) or "") .. "\n", "(.-)\r?\n") do
    if string.match(line, "^%s*[^#%s]") then
      break
    end
    found = found or string.match(line, "^#POLLUX%s") ~= nil or line == "#POLLUX"
  end
  file:close()
  return found
end

-- True where --pollux (a SPANK option) or SBATCH_POLLUX opts in.
local function opts_in_by_option(options)
  local spank = options["spank"]
  local given = type(spank) == "table" and type(spank["pollux"]) == "table" and spank["pollux"]["pollux"]
  given = given or os.getenv("SBATCH_POLLUX")
  return given ~= nil and given ~= false and given ~= "" and given ~= "no"
end

function pollux_pre_submit(options, pack_offset)
  local argv = options["argv"]
  if options["type"] == "sbatch" and type(argv) == "table" and argv[1] then
    if opts_in(argv[1]) or opts_in_by_option(options) then
      -- job_submit/lua of 22.05 does not see the deadline. "Unknown" is what sbatch has where none was given.
      local deadline = options["deadline"]
      if deadline ~= nil and deadline ~= "" and deadline ~= "Unknown" and deadline ~= "N/A" then
        slurm.log_error("#POLLUX: --deadline cannot be used by a Pollux job: Slurm would end the job while it waits "
          .. "for GPUs; give --time")
        return slurm.ERROR
      end
      if options["open-mode"] == nil then
        options["open-mode"] = "append"
      end
    end
  end
  return slurm.SUCCESS
end

slurm_cli_pre_submit = slurm_cli_pre_submit or pollux_pre_submit
-- The plugin wants all three.
slurm_cli_setup_defaults = slurm_cli_setup_defaults or function(options, early_pass) return slurm.SUCCESS end
slurm_cli_post_submit = slurm_cli_post_submit or function(offset, job_id, step_id) return slurm.SUCCESS end

return slurm.SUCCESS
