#!/bin/bash
# From a bare Debian root to the first job that polluxd places, by the commands of docs/administrator-guide/install.md, under
# a real systemd. As root.
#
#   contrib/packaging/install_test.sh [FOLDER OF PACKAGES]      (dist)
#
# machine.sh describes SUITE, ROOT and MIRROR.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
packages=$(cd "${1:-$here/../../dist}" && pwd)
# shellcheck source=contrib/packaging/machine.sh
. "$here/machine.sh"

site_machine
page_began=$SECONDS
follow
job=$(inside squeue -h -o %i)
until_true 120 "polluxd does not start the job" inside sh -c "squeue -h -o %T -j $job | grep -qx RUNNING"
until_true 30 "no move is recorded" inside sh -c "polluxctl moves $job --json | grep -q to"
gives_token
inside scontrol -o show job "$job" >>"$log"
inside polluxctl moves >>"$log"
inside sh -c "scontrol show job $job | grep -q AdminComment=pollux:v1" || fail "the job is none of Pollux"
say "polluxd started job $job; $count commands, $((SECONDS - page_began)) s; from nothing $((SECONDS - began)) s"
inside polluxctl status >>"$log" 2>&1 || fail "polluxctl status"
as_written polluxd polluxd-gateway
