#!/bin/bash
# Builds the Python packages, wheel and sdist, and installs the wheel in an environment of its own to see that it is whole. As
# root it also runs the commands of "Without packages" of the install page, over /usr, /etc and /opt in a mount namespace of
# its own: the machine stays as it is.
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

[ "$(id -u)" = 0 ] || exit 0
python3 "$repository/contrib/packaging/page_commands.py" \
  "$repository/docs/administrator-guide/install.md" "Without packages" >"$work/commands"
mkdir "$work/over"
unshare --mount --propagation private bash -euo pipefail -c '
mount -t tmpfs none "$1/over"
for folder in usr etc opt; do
  mkdir -p "$1/over/$folder/upper" "$1/over/$folder/work"
  mount -t overlay overlay -o "lowerdir=/$folder,upperdir=$1/over/$folder/upper,workdir=$1/over/$folder/work" "/$folder"
done
rm -rf /etc/pollux /opt/pollux /usr/bin/polluxd /usr/bin/polluxctl
userdel pollux 2>/dev/null || true
while IFS= read -r line; do
  echo "# $line"
  bash -euo pipefail -c "$line" </dev/null
done <"$1/commands"
[ "$(stat -c "%a %U %G" /etc/pollux/polluxd.toml)" = "640 root pollux" ]
# The secret comes with the hooks: a later step of the page.
(runuser -u pollux -- polluxd check 2>&1 || true) | grep -q "ticket.secret: No such file.*make /etc/pollux/ticket.secret"
(runuser -u pollux -- polluxd check 2>&1 || true) | grep -q "the configuration is sound"
runuser -u pollux -- polluxctl --help >/dev/null
' without "$work" >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; echo "build_python.sh: the commands of \"Without packages\" failed" >&2; exit 1; }
echo "  the commands of \"Without packages\" work"
