# Functions for tests on a Debian root under a real systemd (systemd-nspawn, in a network of its own), with the Slurm of a
# site: one node of four stand-in GPUs, slurmdbd, MariaDB, PostgreSQL. A script sources this file after it has set `packages`,
# a folder of packages.
#
#   site_machine         makes the root and starts it; /packages there has the packages
#   inside COMMAND...    runs a command there, as root
#   follow [PAGE [HEADING]]   runs the commands of a page there, in /packages; `count` is their number
#   until_true SECONDS WHAT COMMAND...   waits until a command there succeeds
#   gives_token          submits a Pollux job as an ordinary user; fails unless the gateway gives it a token
#   as_written UNIT...   fails unless Pollux' services run with the variables and the hardening of contrib/systemd
#   say, fail TEXT       a line with the seconds so far; fail shows the end of the log and of the journal, and exits
#
# before_boot   name of the script's own function that completes the root before the machine starts     (none)
# SUITE   Debian suite, that of the packages      (bookworm)
# ROOT    where the Debian root lies; it is removed first and at the end        (/var/tmp/pollux-install-SUITE)
# SITE    a folder that keeps the root with Slurm for the next test, before any package of Pollux; made if it is missing     (none)
# MIRROR  of Debian                                                             (http://deb.debian.org/debian)
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
suite=${SUITE:-bookworm}
root=${ROOT:-/var/tmp/pollux-install-$suite}
log=$root.log
began=$SECONDS
machine=
: >"$log"

program=$(basename "$0")
[ "$(id -u)" = 0 ] || { echo "$program: debootstrap and systemd-nspawn need root" >&2; exit 1; }
for needed in debootstrap systemd-nspawn; do
  command -v $needed >/dev/null || { echo "$program: install debootstrap and systemd-container first" >&2; exit 1; }
done
ls "$packages"/pollux-runtime_*.deb >/dev/null || { echo "$program: no packages in $packages: run make deb" >&2; exit 1; }

say() { printf '%5d s  %s\n' $((SECONDS - began)) "$1" | tee -a "$log"; }
fail() {
  say "FAILED: $1"
  tail -n 25 "$log" >&2
  inside journalctl --no-pager -n 25 -u polluxd -u slurmctld -u slurmd >&2 2>/dev/null || true
  exit 1
}
stop() {
  # The machine's first process takes all others with it; an orderly halt waits minutes for Slurm's steps.
  [ -z "$machine" ] || { pkill -KILL -P "$machine" || true; wait "$machine" 2>/dev/null || true; }
  [ -n "${KEEP:-}" ] || rm -rf "$root"
}
trap stop EXIT
in_root() { chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive "$@"; }
# The shell that an administrator has on the machine.
inside() {
  local leader
  leader=$(pgrep -P "$machine" | head -n 1)
  nsenter --target "$leader" --all /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
    DEBIAN_FRONTEND=noninteractive "$@"
}
follow() {
  local line
  count=0
  while IFS= read -r line; do
    count=$((count + 1))
    # The page says to wait: before the first decision in mode enforce, jobs start as plain ones.
    case $line in sbatch*) until_true 120 "polluxd does not act" inside test -s /run/polluxd/heartbeat ;; esac
    say "# $line"
    inside bash -c "cd /packages && $line" >>"$log" 2>&1 </dev/null || fail "command $count of the page"
  done < <(python3 "$repository/contrib/packaging/page_commands.py" "$@")
  [ $count -gt 0 ] || fail "reading the page"
}
until_true() { # until_true SECONDS WHAT command...
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >>"$log" 2>&1; do
    [ $SECONDS -lt $end ] || fail "$what"
    sleep 1
  done
}

gives_token() {
  inside rm -f /tmp/token.log
  local end=$((SECONDS + 90))
  inside sh -c 'id -u eve >/dev/null 2>&1 || useradd -m eve'
  cp "$repository/contrib/packaging/token_job.py" "$root/srv/token_job.py"
  inside runuser -u eve -- sh -c "cd && printf '#!/bin/bash\n#POLLUX max-gpus=1\nexec /usr/lib/pollux/bin/python3 /srv/token_job.py\n' >job.sh &&
    sbatch --gres=gpu:1 --output=/tmp/token.log job.sh" >>"$log" 2>&1 || fail "sbatch of an ordinary user"
  until inside grep -q token /tmp/token.log 2>/dev/null; do
    [ $SECONDS -lt $end ] || fail "the job of an ordinary user does not ask the gateway"
    sleep 1
  done
  inside cat /tmp/token.log >>"$log"
  inside grep -qx "the gateway gave a token" /tmp/token.log || fail "$(inside cat /tmp/token.log)"
  say "an ordinary user's job has a token of the gateway"
}

as_written() {
  local unit variable line pid
  for unit in "$@"; do
    inside systemd-analyze verify --man=no "$unit.service" >"$log.unit" 2>&1 && [ ! -s "$log.unit" ] || fail "systemd-analyze verify $unit: $(cat "$log.unit")"
    rm "$log.unit"
    inside systemd-analyze security --no-pager --threshold=15 "$unit.service" >>"$log" 2>&1 || fail "the exposure of $unit is above 1.5"
    pid=$(inside systemctl show -P MainPID "$unit")
    for variable in $(sed -n 's/^Environment=//p' "$repository/contrib/systemd/$unit.service"); do
      inside sh -c "tr '\\0' '\\n' </proc/$pid/environ | grep -qx '$variable'" || fail "$unit runs without $variable"
      say "$unit runs with $variable"
    done
    for line in 'NoNewPrivs:.1' 'Seccomp:.2' 'CapEff:.0*' 'CapBnd:.0*'; do
      inside grep -qx "$line" "/proc/$pid/status" || fail "$unit runs without $line"
    done
  done
}

bare_site() {
  debootstrap --variant=minbase --include=systemd-sysv,dbus,ca-certificates,python3 "$suite" "$root" \
    "${MIRROR:-http://deb.debian.org/debian}" >>"$log" 2>&1 || fail debootstrap
  say "a bare Debian $suite"
  # A root that is thrown away needs no fsync per file. Real machines have it: the line goes before the page begins.
  echo force-unsafe-io >"$root/etc/dpkg/dpkg.cfg.d/unsafe"
  printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
  chmod 755 "$root/usr/sbin/policy-rc.d"
  printf '127.0.0.1 localhost one\n' >"$root/etc/hosts"
  echo one >"$root/etc/hostname"
  cp /etc/resolv.conf "$root/etc/resolv.conf"
  in_root sh -c 'apt-get update -q && apt-get install -y -q --no-install-recommends munge slurmctld slurmd slurm-client \
    slurm-wlm-basic-plugins slurmdbd slurm-wlm-mysql-plugin mariadb-server postgresql adduser' >>"$log" 2>&1 || fail "the packages of Slurm"
  rm "$root/usr/sbin/policy-rc.d" "$root/etc/dpkg/dpkg.cfg.d/unsafe"
}

site_machine() {
  rm -rf "$root"
  if [ -n "${SITE:-}" ] && [ -e "$SITE/etc/debian_version" ]; then
    cp -a "$SITE" "$root"
  else
    bare_site
    [ -z "${SITE:-}" ] || cp -a "$root" "$SITE"
  fi
  mkdir -p "$root/etc/slurm"
  cat >"$root/etc/slurm/slurm.conf" <<END
ClusterName=main
SlurmctldHost=one
SlurmUser=slurm
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
SelectType=select/cons_tres
GresTypes=gpu
SlurmdParameters=config_overrides
DefMemPerCPU=100
ReturnToService=2
NodeName=one CPUs=4 RealMemory=1000 Gres=gpu:4
PartitionName=all Nodes=one Default=YES MaxTime=1-0
END
  echo 'Name=gpu File=/dev/gpu[0-3]' >"$root/etc/slurm/gres.conf"
  printf 'AuthType=auth/munge\nDbdHost=localhost\nSlurmUser=slurm\nLogFile=/var/log/slurm/slurmdbd.log\nPidFile=/run/slurmdbd.pid\nStorageType=accounting_storage/mysql\nStorageUser=slurm\nStoragePass=once\n' >"$root/etc/slurm/slurmdbd.conf"
  chmod 600 "$root/etc/slurm/slurmdbd.conf"
  in_root sh -c 'chown slurm: /etc/slurm/slurmdbd.conf; install -d -o slurm -g slurm /var/log/slurm /var/lib/slurm/slurmctld'
  mkdir -p "$root/packages"
  cp "$packages"/*.deb "$root/packages"
  [ -z "${before_boot:-}" ] || "$before_boot"
  say "Slurm, MariaDB and PostgreSQL are installed"

  # systemd 256 and 257 (Debian 13) refuse a host with version 1 of control groups without that word; others ignore it.
  devices=()
  for index in 0 1 2 3; do devices+=(--bind=/dev/null:/dev/gpu$index); done
  systemd-nspawn -q -D "$root" --register=no --keep-unit --private-network --machine=one "${devices[@]}" --boot \
    SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1 >>"$log" 2>&1 </dev/null &
  machine=$!
  until_true 90 "systemd does not come up" inside systemctl is-active -q multi-user.target
  # getaddrinfo finds no address on a machine that has a loopback interface alone.
  nsenter --target "$(pgrep -P "$machine" | head -n 1)" --net sh -c 'ip link set lo up; ip link add net0 type veth peer name net1
    ip address add 10.77.0.1/24 dev net0; ip link set net0 up; ip link set net1 up' >>"$log" 2>&1 || fail "the machine's network"
  inside mariadb -e "CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED BY 'once'; GRANT ALL ON slurm_acct_db.* TO slurm@localhost" >>"$log" 2>&1 || fail "MariaDB"
  inside systemctl restart slurmdbd
  until_true 60 "slurmdbd does not answer" inside sacctmgr -n show cluster
  inside sacctmgr -i add cluster main >>"$log" 2>&1 || true # slurmctld may have been faster
  inside systemctl restart slurmctld slurmd
  until_true 60 "the node is not idle" inside sh -c 'sinfo -h -o %T | grep -qx idle'
  say "a Slurm of one node runs under systemd $(inside systemctl --version | sed -n '1s/systemd //p')"
}
