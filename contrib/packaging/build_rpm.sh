#!/bin/bash
# Builds the RPMs of this tree for the machine that it runs on: dist/*.rpm, and looks at what is in them. As any user; needs
# rpmbuild, python3 3.11 or newer with venv, gcc and Slurm's headers.
#
#   contrib/packaging/build_rpm.sh [FOLDER]      where the packages go (dist)
set -euo pipefail

repository=$(cd "$(dirname "$0")/../.." && pwd)
out=${1:-$repository/dist}
mkdir -p "$out"
out=$(cd "$out" && pwd)
command -v rpmbuild >/dev/null || { echo "build_rpm.sh: install rpmbuild first (Debian: rpm; Fedora: rpm-build)" >&2; exit 1; }
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$repository/agent/pollux/version.py")
work=$(mktemp -d /tmp/pollux-rpm.XXXXXX)
trap 'rm -rf "$work"' EXIT

# The files that git knows, as they are now: no build output, no virtual environment.
mkdir "$work/polluxd"
(cd "$repository" && git ls-files -z --cached --others --exclude-standard | tar --null -T - -c) | tar -x -C "$work/polluxd"
cd "$work/polluxd"
rpmbuild -bb --build-in-place --nodeps --define "_topdir $work/rpm" --define "_dbpath $work/db" \
  --define "pollux_version $version" --define "pollux_parts $work/parts" contrib/packaging/rpm/polluxd.spec >"$work/log" 2>&1 || {
  echo "build_rpm.sh: rpmbuild failed. The end of its log:" >&2
  tail -n 40 "$work/log" >&2
  exit 1
}

# Each package has the files that were laid out for it, and the environment runs where it is installed.
rpms=("$work"/rpm/RPMS/*/*.rpm)
for package in polluxd pollux-runtime pollux-node pollux-login; do
  made=$(ls "$work"/rpm/RPMS/*/"$package-$version"-*.rpm)
  diff <(rpm -qlp --define "_dbpath $work/db" "$made" | grep -vx /usr/lib/pollux | sort) \
    <(cd "$work/parts/$package" && find . ! -type d -printf '/%P\n' | sort) >&2 || {
    echo "build_rpm.sh: $package has other files than lay_out.sh lays out" >&2
    exit 1
  }
done
mkdir "$work/installed"
for made in "${rpms[@]}"; do rpm2archive - <"$made" | tar -xz -C "$work/installed"; done
run=("$work/installed/usr/lib/pollux/bin/python3" -c 'import sys; from polluxd.cli.daemon import main; sys.argv = ["polluxd", "example-config"]; main()')
"${run[@]}" | cmp - "$work/installed/usr/share/polluxd/polluxd.toml" >&2 || {
  echo "build_rpm.sh: polluxd of the RPMs prints another example configuration" >&2
  exit 1
}
rm -f "$out"/*.rpm
cp "${rpms[@]}" "$out"
ls -lh "$out"/*.rpm | awk '{ print "  " $NF " (" $5 ")" }'
