#!/bin/bash
# Builds the two Python packages, polluxd and pollux-agent, wheel and sdist, and installs each wheel in an environment of its
# own to see that it is whole. As root it also runs the commands of "Without packages" of the install page, over /usr, /etc and /opt in a mount namespace of
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
rm -f "$out"/polluxd-*.whl "$out"/polluxd-*.tar.gz "$out"/pollux_agent-*
for folder in agent .; do (cd "$folder" && "$work/tools/bin/hatchling" build -t sdist -t wheel -d "$out" >/dev/null); done

# install_wheel DISTRIBUTION COMMAND...    The commands are all that the wheel brings.
install_wheel() {
  local venv=$work/$1 wheel
  wheel=$(echo "$out"/"$1"-*.whl)
  /usr/bin/python3 -m venv "$venv"
  ls "$venv/bin" >"$venv.before"
  "$venv/bin/pip" install -q --no-deps "$wheel"
  diff <(printf '%s\n' "${@:2}") <(ls "$venv/bin" | grep -vxFf "$venv.before") >&2 || {
    echo "build_python.sh: $wheel has other commands than ${*:2}" >&2
    exit 1
  }
}
install_wheel pollux_agent pollux
install_wheel polluxd polluxctl polluxd
for file in polluxd/polluxd/_sql/roles.sql polluxd/polluxd/_sql/migrations/0001_schema.sql polluxd/polluxd/_slurm_hooks/job_submit.lua pollux_agent/pollux/py.typed; do
  [ -e "$work/${file%%/*}"/lib/python*/site-packages/"${file#*/}" ] || { echo "build_python.sh: the wheel lacks $file" >&2; exit 1; }
done
ls -lh "$out"/*.whl "$out"/*.tar.gz | awk '{ print "  " $NF " (" $5 ")" }'

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
for user in pollux-gateway pollux; do userdel "$user" 2>/dev/null || true; done
while IFS= read -r line; do
  echo "# $line"
  bash -euo pipefail -c "$line" </dev/null
done <"$1/commands"
[ "$(stat -c "%a %U %G" /etc/pollux/polluxd.toml)" = "640 root pollux" ]
(runuser -u pollux -- polluxd check 2>&1 || true) | grep -q "the configuration is sound"
runuser -u pollux -- polluxctl --help >/dev/null
' without "$work" >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; echo "build_python.sh: the commands of \"Without packages\" failed" >&2; exit 1; }
echo "  the commands of \"Without packages\" work"
