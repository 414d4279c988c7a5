#!/bin/bash
# Builds the Python packages, wheel and sdist, and installs the wheel in an environment of its own to see that it is whole.
#
#   contrib/packaging/build_python.sh [FOLDER]      (dist)
set -euo pipefail

repository=$(cd "$(dirname "$0")/../.." && pwd)
out=${1:-$repository/dist}
mkdir -p "$out"
work=$(mktemp -d /tmp/pollux-dist.XXXXXX)
trap 'rm -rf "$work"' EXIT
/usr/bin/python3 -m venv "$work/tools"
"$work/tools/bin/pip" install -q hatchling
cd "$repository"
"$work/tools/bin/hatchling" build -t sdist -t wheel -d "$out" >/dev/null
/usr/bin/python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-deps "$out"/polluxd-*.whl
site=$(echo "$work"/venv/lib/python*/site-packages)
for file in polluxd/_sql/roles.sql polluxd/_sql/migrations/0001_initial.sql polluxd/_slurm_hooks/job_submit.lua polluxd/_slurm_hooks/ticket pollux/version.py; do
  [ -s "$site/$file" ] || { echo "build_python.sh: the wheel lacks $file" >&2; exit 1; }
done
ls -lh "$out"/polluxd-*.whl "$out"/polluxd-*.tar.gz | awk '{ print "  " $NF " (" $5 ")" }'
