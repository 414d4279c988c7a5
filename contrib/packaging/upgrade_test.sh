#!/bin/bash
# From packages of an earlier commit, with the agent and the database logins of 0.1.0, to those of this one: its running job
# trains on, and is shown as what it is. Then removal and purge. Under a real systemd. As root.
#
#   contrib/packaging/upgrade_test.sh PREVIOUS_PACKAGES PREVIOUS_INSTALL_PAGE [FOLDER OF PACKAGES]      (dist)
#
# machine.sh describes SUITE, ROOT and MIRROR.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
packages=$(cd "$1" && pwd)
page=$(realpath "$2")
newer=$(cd "${3:-$here/../../dist}" && pwd)
# shellcheck source=contrib/packaging/machine.sh
. "$here/machine.sh"
version() { inside dpkg-query -W -f '${Version}' polluxd; }
accepted() { inside sh -c 'grep -c accepted /tmp/agent.log 2>/dev/null || true'; }
more_accepted() { local now; now=$(accepted); [ "${now:-0}" -gt "$1" ]; }
kept() { inside sha256sum /etc/pollux/polluxd.toml /etc/pollux/pgpass; }
drained() { inside sinfo -h -o '%T %E' | grep -E 'drain|down'; }

site_machine
follow "$page"
inside scancel -u root
previous=$(version)

# A training that reports: the previous version's agent, beside the packages, which the upgrade replaces.
inside cp -a /usr/lib/pollux /srv/agent
cp "$here/previous_agent.py" "$root/srv/agent/job.py"
inside useradd -m ada
inside runuser -u ada -- sh -c "cd && printf '#!/bin/bash\n#POLLUX max-gpus=1\nexec /srv/agent/bin/python3 /srv/agent/job.py\n' >job.sh &&
  sbatch --gres=gpu:1 --output=/tmp/agent.log job.sh" >>"$log" 2>&1 || fail "sbatch"
job=$(inside squeue -h -u ada -o %i)
until_true 120 "the agent of the previous version does not report" more_accepted 3
restarts() { inside scontrol -o show job "$job" | grep -o 'JobState=RUNNING.* Restarts=[0-9]*' | grep -o 'Restarts=.*'; }
was=$(restarts)
files=$(kept)
say "an agent of $previous reports"

rm "$root"/packages/*.deb
cp "$newer"/*.deb "$root/packages"
inside sh -c 'cd /packages && apt-get install -y ./*.deb' >>"$log" 2>&1 || fail "apt-get install of the newer packages"
[ "$(version)" != "$previous" ] || fail "the version is the same"
reports=$(accepted)
until_true 60 "the agent does not report between the packages and the schema" more_accepted "$reports"
upgrade_began=$SECONDS
follow "$repository/docs/administrator-guide/upgrade.md" Upgrade
say "upgraded from $previous to $(version); $count commands, $((SECONDS - upgrade_began)) s"
until_true 120 "polluxd does not decide after the upgrade" inside polluxctl status
inside polluxctl db check >>"$log" 2>&1 || fail "polluxctl db check"
as_written polluxd polluxd-gateway
until_true 60 "the gateway does not answer" inside sh -c 'polluxctl doctor | grep "^ok *gateway"'
[ "$(kept)" = "$files" ] || fail "the upgrade changed a file of the site"
for file in ticket.secret hooks.json hooks/ticket; do
  ! inside test -e "/etc/pollux/$file" || fail "the upgrade left /etc/pollux/$file"
done
! inside grep -iE '^ *(Prolog|Epilog|TaskProlog) *=.*pollux' /etc/slurm/slurm.conf || fail "slurm.conf still calls a script of 0.1.0"
until_true 120 "polluxctl does not show an agent of 0.1.0 as such" inside sh -c "polluxctl explain $job | grep -q 'its agent reports to polluxd 0.1'"
[ "$(restarts)" = "$was" ] || fail "the job was restarted by the upgrade"
gives_token
inside scancel -u eve
[ "$(restarts)" = "$was" ] || fail "the job of 0.1.0 was restarted after the upgrade"
! drained || fail "the upgrade drained the node"
say "the job of 0.1.0 runs on, and is shown as such"

# What a job used, as the page on sharing has it.
inside sacct --duplicates --noconvert -nPX -j "$job" -o JobID,State,Start,ElapsedRaw,AllocTRES >"$log.sacct" 2>>"$log" || fail "sacct"
grep -q "^$job|RUNNING|" "$log.sacct" || { cat "$log.sacct" >&2; fail "sacct does not show the job"; }
rm "$log.sacct"

# Removal, as the install page has it.
follow "$repository/docs/administrator-guide/install.md" Removal
! inside sh -c "systemctl is-active -q polluxd || systemctl is-active -q polluxd-gateway" || fail "polluxd runs after its removal"
[ "$(kept)" = "$files" ] || fail "the removal took a file of the site"
inside scancel "$job"
inside sh -c "printf '#!/bin/bash\n#POLLUX max-gpus=1\nsleep 60\n' | sbatch --gres=gpu:1 --output=/tmp/plain.log" >>"$log" 2>&1 || fail "sbatch without Pollux"
until_true 60 "a job with a #POLLUX line does not start without Pollux" inside sh -c 'squeue -h -o %T | grep -qx RUNNING'
# Also without the folder of the hooks: nothing calls them.
inside rm -r /etc/pollux/hooks
inside systemctl restart slurmctld slurmd
inside sh -c "printf '#!/bin/bash\n#POLLUX max-gpus=1\nsrun true\n' | sbatch --wait --gres=gpu:1 --output=/tmp/bare.log" >>"$log" 2>&1 || fail "a job without the hooks"
! drained || fail "the removal drained the node"
# The other packages have no file that a removal leaves.
inside apt-get purge -y polluxd >>"$log" 2>&1 || fail "apt-get purge"
[ -z "$(inside sh -c 'dpkg-query -W -f "\${Package}\n" "pollux*" 2>/dev/null')" ] || fail "dpkg still knows a package"
left=$(inside sh -c 'for file in /usr/lib/pollux /usr/bin/pollux* /etc/pollux/polluxd.toml /usr/lib/systemd/system/pollux* \
  /lib/systemd/system/pollux* /etc/systemd/system/*/pollux* /usr/share/pollux* /usr/share/doc/pollux*; do [ ! -e "$file" ] && [ ! -L "$file" ] || echo "$file"; done')
[ -z "$left" ] || fail "the purge left $(echo $left)"
inside systemctl is-active -q slurmctld slurmd || fail "Slurm without Pollux"
say "removed and purged; jobs with #POLLUX lines start as plain jobs"
