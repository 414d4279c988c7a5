#!/bin/bash
# Builds the Debian packages of this tree: dist/*.deb. As any user, on the Debian release that they are for; needs
# build-essential, debhelper, python3-venv and libslurm-dev there.
#
#   contrib/packaging/build_deb.sh [FOLDER]      where the packages go (dist)
#
# VERSION   of the packages   (that of agent/pollux/version.py)
# REF       commit to build   (the files as they are now)
# SUITE     Debian suite to build in, in a root made by debootstrap; as root      (that of this machine)
# ROOT      where that root lies; it is kept, 0.7 GB      (/var/tmp/pollux-build-SUITE)
# LEVEL     of xz: 6 makes packages a fifth smaller, and takes four times as long      (1)
set -euo pipefail

repository=$(cd "$(dirname "$0")/../.." && pwd)
out=${1:-$repository/dist}
mkdir -p "$out"
out=$(cd "$out" && pwd)
own=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$repository/agent/pollux/version.py")
version=${VERSION:-$own}
work=$(mktemp -d /tmp/pollux-deb.XXXXXX)
trap 'rm -rf "$work"' EXIT

needed=(build-essential debhelper python3-venv libslurm-dev)
if [ -z "${SUITE:-}" ]; then
  missing=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' "${needed[@]}" 2>&1 | grep -v '^installed ' || true)
  [ -z "$missing" ] || { echo "build_deb.sh: install ${needed[*]} first" >&2; exit 1; }
fi

# The files that git knows: no build output, no virtual environment.
mkdir "$work/polluxd"
if [ -n "${REF:-}" ]; then
  git -C "$repository" archive "$REF" | tar -x -C "$work/polluxd"
else
  (cd "$repository" && git ls-files -z --cached --others --exclude-standard | tar --null -T - -c) | tar -x -C "$work/polluxd"
fi
cp -r "$work/polluxd/contrib/packaging/debian" "$work/polluxd/debian"
cd "$work/polluxd"
chmod 755 debian/rules
cat >debian/changelog <<END
polluxd ($version) unstable; urgency=medium

  * See /usr/share/doc/polluxd/changelog.gz.

 -- polluxd maintainers <maintainers@polluxd.example.org>  $(date -R)
END
build=(dpkg-buildpackage -b -us -uc -rfakeroot)
if [ -n "${SUITE:-}" ]; then
  suite=$SUITE root=${ROOT:-/var/tmp/pollux-build-$SUITE}
  # shellcheck source=contrib/devcluster/debian_root.sh
  . "$repository/contrib/devcluster/debian_root.sh"
  # shellcheck disable=SC2034 # make_root reads both
  packages=("${needed[@]}" fakeroot ca-certificates) python_packages=(pip)
  repository=$work/polluxd
  make_root
  mkdir -p "$root/built"
  build=(inside env LEVEL="${LEVEL:-1}" sh -c 'rm -rf /built/* && cp -a . /built/polluxd && cd /built/polluxd && exec "$@"' sh "${build[@]}")
fi
LEVEL=${LEVEL:-1} "${build[@]}" >"$work/log" 2>&1 || {
  echo "build_deb.sh: dpkg-buildpackage failed. The end of its log:" >&2
  tail -n 40 "$work/log" >&2
  exit 1
}
made=$work
[ -z "${SUITE:-}" ] || made=$root/built
rm -f "$out"/*.deb
cp "$made"/*.deb "$out"
ls -lh "$out"/*.deb | awk '{ print "  " $NF " (" $5 ")" }'
