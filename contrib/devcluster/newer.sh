#!/bin/bash
# Runs the Slurm tests in a Debian root of a newer suite, hence on its newer Slurm; the machine's own packages stay
# as they are. The root is kept and used again: about 1 GB (1.5 with pyslurm) and some minutes the first time.
#
#   contrib/devcluster/newer.sh [pytest's arguments]       as root
#
# Where pyslurm can be built for that Slurm (forky's), the tests of the client that uses it run there too.
#
# SUITE   Debian suite: trixie has Slurm 24.11, forky 26.05          (trixie)
# ROOT    where the Debian root lies                                 (/var/tmp/pollux-SUITE)
# MIRROR  of Debian                                                  (http://deb.debian.org/debian)
# PYSLURM "no" leaves pyslurm out: it takes a compiler, 0.5 GB and two minutes (yes)
set -euo pipefail

repository=$(cd "$(dirname "$0")/../.." && pwd)
suite=${SUITE:-trixie}
root=${ROOT:-/var/tmp/pollux-$suite}
mirror=${MIRROR:-http://deb.debian.org/debian}
log=$root.log
packages=munge,slurmctld,slurmd,slurm-client,slurm-wlm-basic-plugins,slurmdbd,slurm-wlm-mysql-plugin
packages+=,mariadb-server-core,mariadb-client-core,postgresql,python3-venv,lua5.1,ca-certificates,procps
# What the tests of the daemon's side import: no torch, no agent.
python_packages=(numpy scipy sqlalchemy psycopg2-binary pydantic typer rich ClusterShell sdnotify
  pytest pytest-timeout hypothesis)
tests=(tests/integration/test_slurm_contract.py tests/integration/test_slurm_hooks.py
  tests/integration/test_slurm_faults.py tests/integration/test_pyslurm.py tests/unit/slurm)

fail() {
  echo "newer.sh: $1 failed. The end of $log:" >&2
  tail -n 25 "$log" >&2
  exit 1
}

[ "$(id -u)" = 0 ] || { echo "newer.sh: debootstrap, chroot and slurmd need root" >&2; exit 1; }
command -v debootstrap >/dev/null || apt-get install -y -q --no-install-recommends debootstrap >/dev/null 2>&1 || {
  echo "newer.sh: no debootstrap here, and apt-get cannot install it" >&2
  exit 1
}

# The script that enters the root. All mounts and processes are in namespaces of its own and end with it.
enter='
set -e
mount --bind "$2" "$1/repository"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
mount --rbind /sys "$1/sys"
root=$1; shift 2
exec chroot "$root" /usr/bin/env -i HOME=/root LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin \
  PYTHONPATH=/repository:/repository/agent PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 \
  sh -c "cd /repository && exec \"\$@\"" sh "$@"
'
inside() { unshare --mount --pid --fork --kill-child bash -c "$enter" enter "$root" "$repository" "$@"; }

stamp=$root/.pollux-ready
digest=$(cat "$repository/constraints.txt" "$0" | sha256sum | cut -d ' ' -f 1)
if [ "$(cat "$stamp" 2>/dev/null)" != "$digest" ]; then
  began=$SECONDS
  if [ ! -e "$root/repository" ]; then
    rm -rf "$root"
    # debootstrap's script of sid serves every suite that has none of its own yet.
    script=/usr/share/debootstrap/scripts/$suite
    [ -e "$script" ] || script=/usr/share/debootstrap/scripts/sid
    debootstrap --variant=minbase --include="$packages" "$suite" "$root" "$mirror" "$script" >"$log" 2>&1 ||
      fail "debootstrap of $suite"
    mkdir "$root/repository"
  fi
  # Without the hosts each call waits seconds for a name server; the certificates are the machine's own.
  cp /etc/hosts /etc/resolv.conf "$root/etc/"
  [ ! -e /etc/ssl/certs/ca-certificates.crt ] || cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
  # An index's address may hold a password.
  [ -z "${PIP_INDEX_URL:-}" ] || (umask 077 && printf '[global]\nindex-url = %s\n' "$PIP_INDEX_URL" >"$root/etc/pip.conf")
  inside python3 -m venv /venv >>"$log" 2>&1 || fail "virtual environment"
  inside /venv/bin/pip install -q -c constraints.txt "${python_packages[@]}" >>"$log" 2>&1 || fail "pip install"
  echo "$digest" >"$stamp"
  echo "  Debian $suite in $root ($((SECONDS - began)) s)"
fi
built=$root/.pollux-pyslurm
recipe=$(sha256sum <"$repository/contrib/devcluster/pyslurm.sh")
if [ "${PYSLURM:-yes}" != no ] && [ "$(cat "$built" 2>/dev/null)" != "$recipe" ]; then
  status=0
  inside contrib/devcluster/pyslurm.sh >>"$log" 2>&1 || status=$?
  [ $status = 0 ] || [ $status = 3 ] || fail "building pyslurm"
  echo "$recipe" >"$built"
fi
echo "  $(inside slurmctld -V), $(inside python3 --version), $(inside /venv/bin/pip list 2>/dev/null |
  awk '$1 == "pyslurm" { print "pyslurm for Slurm " $2; found = 1 } END { if (!found) print "no pyslurm" }')"
[ $# -gt 0 ] || set -- "${tests[@]}"
# slurmdbd ends there at its first query, refused by its own client library (libmariadb 11.8.9, error 5027).
[ "$suite" != forky ] || set -- "$@" --deselect 'tests/integration/test_slurm_contract.py::test_a_running_job_gives_nodes_back[real]'
inside /venv/bin/python -m pytest -q -p no:cacheprovider "$@"
