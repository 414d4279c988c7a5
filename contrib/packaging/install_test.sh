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

# The gateway off loopback, with a certificate of the site's own authority, as the page has it in polluxd.toml.
inside scancel -u eve
tls_began=$SECONDS
inside sh -ec 'echo "10.77.0.1 head.example.org" >>/etc/hosts
  cd /etc/pollux
  openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj "/CN=authority of the site" -keyout /root/ca.key -out ca.crt
  openssl req -newkey rsa:2048 -nodes -subj /CN=head.example.org -keyout gateway.key -out /root/gateway.csr
  echo subjectAltName=DNS:head.example.org >/root/names
  openssl x509 -req -in /root/gateway.csr -CA ca.crt -CAkey /root/ca.key -CAcreateserial -days 2 -extfile /root/names -out gateway.crt
  chown pollux-gateway gateway.key
  chmod 600 gateway.key' >>"$log" 2>&1 || fail "a certificate"
while IFS= read -r line; do
  [ "${line%% *}" = "[gateway]" ] || inside sed -i "s|^#${line%% *} = .*|$line|" /etc/pollux/polluxd.toml
done < <(sed -n '/^  ```toml$/,/^  ```$/s/^  \([[a-z].*\)$/\1/p' "$repository/docs/administrator-guide/install.md")
inside polluxctl hooks install --yes >>"$log" 2>&1 || fail "polluxctl hooks install"
inside systemctl restart polluxd polluxd-gateway
reaches() { inside "$@" polluxctl doctor --role node --config /root/none 2>&1 | tee -a "$log" | grep '^ok *gateway' >/dev/null; }
until_true 30 "the gateway does not answer over TLS" inside sh -c 'polluxctl doctor | grep "^ok *gateway"'
# A node has no polluxd.toml.
there=(env POLLUX_GATEWAY=https://head.example.org:9851)
reaches "${there[@]}" POLLUX_GATEWAY_CA=/etc/pollux/ca.crt || fail "doctor does not reach the gateway from a node"
! reaches "${there[@]}" || fail "doctor believes a certificate of an unknown authority"
! reaches env POLLUX_GATEWAY=https://10.77.0.1:9851 POLLUX_GATEWAY_CA=/etc/pollux/ca.crt || fail "doctor believes a certificate of another name"
gives_token
inside sh -c "tr '\\0' '\\n' </proc/\$(pgrep -nu eve python3)/environ" | grep -qx POLLUX_GATEWAY=https://head.example.org:9851 || fail "the job has another gateway"
say "the gateway serves off loopback by the site's certificate; $((SECONDS - tls_began)) s"

# Uninstalling, as the page has it, then purge.
kept() { inside sha256sum /etc/pollux/polluxd.toml /etc/pollux/pgpass; }
drained() { inside sinfo -h -o '%T %E' | grep -E 'drain|down'; }
files=$(kept)
follow "$repository/docs/administrator-guide/install.md" Uninstall
! inside sh -c "systemctl is-active -q polluxd || systemctl is-active -q polluxd-gateway" || fail "polluxd runs after its removal"
[ "$(kept)" = "$files" ] || fail "the removal took a file of the site"
inside scancel -u root,eve
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
