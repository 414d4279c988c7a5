--[[
The part of Pollux' hooks that is about AdminComment; job_submit.lua runs this file.

AdminComment carries Pollux' mark, and after it the text of the site, which other tools of the site may read or write:

    pollux:v1 min-gpus=1 ... submitted=T -- tag of the site
]]

-- Bytes that polluxd reads at each look at the queue.
POLLUX_LONGEST_COMMENT = 2048
local BETWEEN = " -- "

-- The mark with the site's text after it, as far as there is room.
function pollux_with_site_text(mark, text)
  local room = POLLUX_LONGEST_COMMENT - #mark - #BETWEEN
  if text == nil or text == "" or room <= 0 then
    return mark
  end
  return mark .. BETWEEN .. string.sub(text, 1, room)
end

-- The mark of a comment; nil where it has none.
local function mark_of(comment)
  if not string.match(comment or "", "^pollux:") then
    return nil
  end
  local at = string.find(comment, BETWEEN, 1, true)
  return at and string.sub(comment, 1, at - 1) or comment
end

-- An administrator's new AdminComment becomes the site's text of a Pollux job. Without its mark polluxd would have to leave
-- the running job alone. An empty text, or one with a mark of its own, stays as it is: that takes the mark away on purpose.
function pollux_keep_mark(update, record)
  local mark, text = mark_of(record.admin_comment), update.admin_comment
  if mark and text ~= nil and text ~= "" and not string.match(text, "^pollux:") then
    update.admin_comment = pollux_with_site_text(mark, text)
  end
end

-- The size that the user wrote, as NODESxGPUS per node; nil where its GPUs do not divide over its nodes.
function pollux_asked_size(nodes, gpus)
  if nodes >= 1 and gpus % nodes == 0 then
    return string.format("asked=%dx%d", nodes, gpus / nodes)
  end
end
