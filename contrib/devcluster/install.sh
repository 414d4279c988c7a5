#!/bin/bash
# Installs what the demo and the integration tests need on Debian 12: the distribution's Slurm, munge and Postgres
# (no service of theirs is started), and a virtual environment `.venv` with this project and a CPU torch.
#
#   contrib/devcluster/install.sh [--demo] [PACKAGE ...]   as root, from anywhere; safe to repeat, and quick when nothing changed
#
# --demo          only what the demo and the shell need: no compiler, no slurmdbd, no tools of developers
# PACKAGE         further Debian packages, for one make target
#
# PYTHON          interpreter for the virtual environment                        (/usr/bin/python3)
# TORCH_INDEX     package index with torch's build for CPUs, where pip's own has none    (PyTorch's)
set -euo pipefail

repository=$(cd "$(dirname "$0")/../.." && pwd)
cd "$repository"
python=${PYTHON:-/usr/bin/python3}
venv=$repository/.venv
stamp=$venv/.installed
log=$(mktemp /tmp/pollux-install.XXXXXX.log)
wanted=all
[ "${1:-}" != --demo ] || { wanted=demo; shift; }
packages=(munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins postgresql python3-venv)
if [ "$wanted" = all ]; then
  # The tests run the hooks in an interpreter of their own; the SPANK plugin is built against the headers of Slurm.
  packages+=(lua5.1 gcc libc6-dev libslurm-dev make)
  # slurmdbd and its MariaDB: users and rights, for the tests of polluxd without root.
  packages+=(slurmdbd slurm-wlm-mysql-plugin mariadb-server-core mariadb-client-core)
fi

packages+=("$@")

fail() {
  echo "install.sh: $1 failed. The end of $log:" >&2
  tail -n 25 "$log" >&2
  exit 1
}

step() { # step "what it does" SECONDS command...; SECONDS: what it took on two cores, packages fetched from nearby
  local what=$1 estimate=$2 began=$SECONDS clock= status=
  shift 2
  echo "## $what: $*" >>"$log"
  if [ -t 1 ]; then
    while kill -0 $$ 2>/dev/null && sleep 1; do printf '\r  %s: %s s of about %s' "$what" $((SECONDS - began)) "$estimate"; done &
    clock=$!
  else
    echo "  $what: about $estimate s"
  fi
  "$@" >>"$log" 2>&1 </dev/null || status=$?
  [ -z "$clock" ] || { kill "$clock"; wait "$clock" || true; printf '\r\033[K'; } 2>/dev/null
  [ -z "$status" ] || fail "$what"
  echo "  $what took $((SECONDS - began)) s"
}

installed() {
  [ "$(dpkg-query -W -f '${db:Status-Status}\n' "${packages[@]}" 2>/dev/null | grep -cx installed)" = "${#packages[@]}" ]
}

apt_install() {
  local policy=/usr/sbin/policy-rc.d made=
  # 101 forbids the packages' scripts to start their services. The dev cluster starts private ones.
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    made=yes
  fi
  # Create no Postgres cluster of the system, unless the machine has one already.
  if [ ! -e /etc/postgresql-common/createcluster.conf ]; then
    mkdir -p /etc/postgresql-common
    echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.conf
  fi
  local status=0
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
    -o Dpkg::Options::=--force-confold "${packages[@]}" || status=$?
  [ -z "$made" ] || rm -f "$policy"
  return $status
}

digest() {
  { cat pyproject.toml agent/pyproject.toml constraints.txt "$0"; echo "$repository $python"; } | sha256sum | cut -d ' ' -f 1
}

make_venv() {
  # Make an incomplete or moved environment again rather than repair it.
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || { rm -rf "$venv"; "$python" -m venv "$venv"; }
}

install() { # from pip's own sources if they have the torch that the constraints name
  # PEP 517 for the packages that come as source only; Debian's own pip would run their setup.py directly.
  local pip=("$venv/bin/pip" install -q --use-pep517 -c constraints.txt)
  "${pip[@]}" "$@" || "${pip[@]}" --extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" "$@"
}

# All at once, and compiled below as far as the demo imports them: that is a tenth of what there is.
demo_packages() { install --no-compile torch -e './agent[torch]' -e '.[sim]' scikit-learn; }
demo_imports="import matplotlib.pyplot, pollux, sklearn.datasets, sklearn.model_selection, torch.distributed
import polluxd.cli.web.live_page, polluxd.daemon, polluxd.gateway.server"

if ! installed; then
  [ "$(id -u)" = 0 ] || { echo "install.sh: installing packages needs root" >&2; exit 1; }
  command -v apt-get >/dev/null || {
    echo "install.sh: no apt-get here; install by your own means: ${packages[*]}" >&2
    exit 1
  }
  step "package lists" 5 apt-get update -q
  step "Slurm, munge, Postgres" 30 apt_install
fi

if ! id -u pollux >/dev/null 2>&1; then
  # The account that polluxd runs as, made as contrib/systemd/polluxd.sysusers makes it.
  step "user pollux" 1 useradd --system --home-dir /var/lib/polluxd --no-create-home --shell /usr/sbin/nologin pollux
fi

exec 9<"$0" # the script itself is the lock between two runs
flock 9
current=$(digest)
case "$wanted: $(cat "$stamp" 2>/dev/null)" in
"all: $current" | "demo: $current" | "demo: $current demo") ;; # an environment with everything has what the demo needs
*)
  step "virtual environment" 5 make_venv
  if [ "$wanted" = demo ]; then
    step "torch, polluxd" 40 demo_packages
    step "first imports" 6 "$venv/bin/python" -c "$demo_imports"
  else
    # Install torch first and alone: so the constraint decides its version before another package asks for any.
    step "torch" 40 install torch
    step "polluxd and its tools" 60 install -e './agent[torch,huggingface,lightning,jax,keras,tune]' \
      -e '.[sim,dev,docs,optimizers]'
  fi
  [ "$wanted" = demo ] && current="$current demo"
  echo "$current" >"$stamp"
  ;;
esac
rm -f "$log"
