#!/bin/bash
# Installs Pollux on a bare Debian root by contrib/ansible, with `ansible-playbook --connection=local`, under a real systemd:
# a second run changes nothing, a run with another mode changes that alone, and polluxd starts a job. As root.
#
#   contrib/packaging/ansible_test.sh [FOLDER OF PACKAGES]      (dist)
#
# machine.sh describes SUITE, ROOT, SITE and MIRROR. pip installs ansible-core, for this test alone, in a folder of the root.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
packages=$(cd "${1:-$here/../../dist}" && pwd)
# shellcheck source=contrib/packaging/machine.sh
. "$here/machine.sh"

ansible() { # pip runs here: the machine has no network
  in_root sh -c 'apt-get install -y -q --no-install-recommends python3-apt' >>"$log" 2>&1 || fail "python3-apt"
  "$repository/.venv/bin/python" -m pip install -q --target "$root/opt/ansible" --only-binary=:all: \
    --python-version "$(in_root python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')" \
    "ansible-core>=2.17" >>"$log" 2>&1 || fail "pip install ansible-core"
  cp -a "$repository/contrib/ansible" "$root/opt/playbook"
  cat >"$root/opt/inventory.ini" <<'END'
[pollux_controller]
one pollux_roles='["controller", "node", "login"]'
[pollux:children]
pollux_controller
[pollux:vars]
ansible_python_interpreter=/usr/bin/python3
ansible_become=false
pollux_cluster=main
pollux_packages=/packages
END
}
play() { # play EXPECTED [WORDS...]: EXPECTED matches the recap's line
  local expected=$1
  shift
  inside env PYTHONPATH=/opt/ansible python3 -m ansible playbook --connection=local -i /opt/inventory.ini \
    /opt/playbook/site.yml "$@" >"$log.play" 2>&1 || { cat "$log.play" >>"$log"; fail "ansible-playbook $*"; }
  cat "$log.play" >>"$log"
  grep -E "^one .*$expected" "$log.play" >/dev/null || fail "ansible-playbook $*: expected $expected"
  say "ansible-playbook $*: $(grep -oE 'ok=[0-9]+ +changed=[0-9]+' "$log.play")"
  rm "$log.play"
}

before_boot=ansible
site_machine
play 'changed=[1-9].*failed=0'
play 'changed=0 .*failed=0'
play 'changed=2 .*failed=0' -e pollux_mode=enforce # the file, and polluxd reads it
until_true 120 "polluxd does not act" inside test -s /run/polluxd/heartbeat
inside sbatch --output=/tmp/first.log /usr/share/doc/pollux-login/examples/first.sh >>"$log" 2>&1 || fail sbatch
job=$(inside squeue -h -o %i)
until_true 120 "polluxd does not start the job" inside sh -c "squeue -h -o %T -j $job | grep -qx RUNNING"
gives_token
say "polluxd started job $job"
