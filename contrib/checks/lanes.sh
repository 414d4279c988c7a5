#!/bin/bash
# Runs commands in lanes, the first ones first: a lane that is free takes the next command.
#
#   contrib/checks/lanes.sh LANES COMMAND ...
#
# The output of a command is shown when it has ended. Exit status: 0 if all commands had 0, else that of a failure.
# TERM here is INT for the running commands, after which tests stop the servers that they started.
set -u

lanes=$1
shift
logs=$(mktemp -d)
declare -A started=() commands=() outputs=()
status=0

end() { # end STATUS: wait for the running commands, and leave
  wait
  rm -rf "$logs"
  exit "$1"
}
trap 'end 130' INT
trap 'kill -INT "${!commands[@]}" 2>/dev/null; end 143' TERM

finish_one() {
  local ended='' result=0
  wait -n -p ended "${!commands[@]}" || result=$?
  cat "${outputs[$ended]}"
  echo "== $((SECONDS - started[$ended])) s, status $result: ${commands[$ended]}"
  unset "commands[$ended]"
  [ "$result" = 0 ] || status=$result
}

for command; do
  [ "${#commands[@]}" -lt "$lanes" ] || finish_one
  log=$(mktemp -p "$logs")
  # A command in the background would ignore INT.
  env --default-signal=INT bash -c "exec $command" >"$log" 2>&1 </dev/null &
  commands[$!]=$command outputs[$!]=$log started[$!]=$SECONDS
done
while [ "${#commands[@]}" -gt 0 ]; do finish_one; done
rm -rf "$logs"
exit "$status"
