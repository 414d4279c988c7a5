#!/bin/bash
# Builds the Debian packages of this tree for the Debian release that it runs on: dist/*.deb. As any user; needs
# debhelper, python3-venv, gcc and libslurm-dev.
#
#   contrib/packaging/build_deb.sh [FOLDER]      where the packages go (dist)
#
# VERSION   of the packages   (that of agent/pollux/version.py)
set -euo pipefail

repository=$(cd "$(dirname "$0")/../.." && pwd)
out=${1:-$repository/dist}
mkdir -p "$out"
out=$(cd "$out" && pwd)
own=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$repository/agent/pollux/version.py")
version=${VERSION:-$own}
work=$(mktemp -d /tmp/pollux-deb.XXXXXX)
trap 'rm -rf "$work"' EXIT

missing=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' debhelper python3-venv gcc libslurm-dev 2>&1 | grep -v '^installed ' || true)
[ -z "$missing" ] || { echo "build_deb.sh: install debhelper, python3-venv, gcc and libslurm-dev first" >&2; exit 1; }

# The files that git knows, as they are now: no build output, no virtual environment.
mkdir "$work/polluxd"
(cd "$repository" && git ls-files -z --cached --others --exclude-standard | tar --null -T - -c) | tar -x -C "$work/polluxd"
cp -r "$work/polluxd/contrib/packaging/debian" "$work/polluxd/debian"
cd "$work/polluxd"
chmod 755 debian/rules
cat >debian/changelog <<END
polluxd ($version) unstable; urgency=medium

  * See /usr/share/doc/polluxd/changelog.gz.

 -- polluxd maintainers <maintainers@polluxd.example.org>  $(date -R)
END
dpkg-buildpackage -b -us -uc -rfakeroot >"$work/log" 2>&1 || {
  echo "build_deb.sh: dpkg-buildpackage failed. The end of its log:" >&2
  tail -n 40 "$work/log" >&2
  exit 1
}
rm -f "$out"/*.deb
cp "$work"/*.deb "$out"
ls -lh "$out"/*.deb | awk '{ print "  " $NF " (" $5 ")" }'
