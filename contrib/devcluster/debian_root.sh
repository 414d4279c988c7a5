# Functions for a Debian root of another suite; a script sources this file after it has set `suite` and `root`.
#
#   make_root           makes the root with the Debian packages of `packages`, and in it /venv with the Python packages
#                       of `python_packages`, as constraints.txt pins them; quick where nothing has changed
#   inside COMMAND...   runs a command in the root, in the repository (/repository there)
#   fail WHAT           says what failed, with the end of the log, and exits
#
# MIRROR  of Debian   (http://deb.debian.org/debian)
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
mirror=${MIRROR:-http://deb.debian.org/debian}
log=$root.log
venv_options=()

fail() {
  echo "$(basename "$0"): $1 failed. The end of $log:" >&2
  tail -n 25 "$log" >&2
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

make_root() {
  [ "$(id -u)" = 0 ] || { echo "$(basename "$0"): debootstrap and chroot need root" >&2; exit 1; }
  command -v debootstrap >/dev/null || apt-get install -y -q --no-install-recommends debootstrap >/dev/null 2>&1 || {
    echo "$(basename "$0"): no debootstrap here, and apt-get cannot install it" >&2
    exit 1
  }
  local stamp=$root/.pollux-ready digest began=$SECONDS script=/usr/share/debootstrap/scripts/$suite
  # A script may make a root for different tests: what a root has is part of its stamp.
  digest=$({ cat "$repository/constraints.txt" "$0" "${BASH_SOURCE[0]}"
    echo "${packages[*]} ${python_packages[*]} ${venv_options[*]}"; } | sha256sum | cut -d ' ' -f 1)
  [ "$(cat "$stamp" 2>/dev/null)" != "$digest" ] || return 0
  if [ ! -e "$root/repository" ]; then
    rm -rf "$root"
    # debootstrap's script of sid serves every suite that has none of its own yet.
    [ -e "$script" ] || script=/usr/share/debootstrap/scripts/sid
    debootstrap --variant=minbase "$suite" "$root" "$mirror" "$script" >"$log" 2>&1 || fail "debootstrap of $suite"
    # The packages start no service.
    printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
    chmod 755 "$root/usr/sbin/policy-rc.d"
    mkdir "$root/repository"
  fi
  # Without the hosts each call waits seconds for a name server; the certificates are the machine's own.
  cp /etc/hosts /etc/resolv.conf "$root/etc/"
  inside apt-get update -q >>"$log" 2>&1 || true # an old package list is no reason to stop
  inside env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${packages[@]}" \
    >>"$log" 2>&1 || fail "apt-get install"
  [ ! -e /etc/ssl/certs/ca-certificates.crt ] || cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
  # An index's address may hold a password.
  [ -z "${PIP_INDEX_URL:-}" ] || (umask 077 && printf '[global]\nindex-url = %s\n' "$PIP_INDEX_URL" >"$root/etc/pip.conf")
  inside python3 -m venv "${venv_options[@]}" /venv >>"$log" 2>&1 || fail "virtual environment"
  inside /venv/bin/pip install -q -c constraints.txt "${python_packages[@]}" >>"$log" 2>&1 || fail "pip install"
  echo "$digest" >"$stamp"
  echo "  Debian $suite in $root ($((SECONDS - began)) s)"
}
