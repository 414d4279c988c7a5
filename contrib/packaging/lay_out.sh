#!/bin/bash
# Lays out the files of all packages below a folder: FOLDER/PACKAGE/usr/... The packages for Debian and the RPMs take their
# files from here. Run in the root of the source tree.
#
#   contrib/packaging/lay_out.sh FOLDER      an absolute path
set -euo pipefail

to=$1
tools=$to/tools
wheels=$to/wheel
venv=$to/pollux-runtime/usr/lib/pollux
export PYTHONDONTWRITEBYTECODE=1

# One private virtual environment in /usr/lib/pollux, on the system's /usr/bin/python3, filled from wheels. What is fetched,
# for it or to build with, has the hash that hashes.sh has written down.
here=contrib/packaging
/usr/bin/python3 -m venv "$tools"
"$tools/bin/pip" install -q --require-hashes --no-deps --only-binary :all: -r $here/hashes-build.txt
"$tools/bin/pip" wheel -q --require-hashes --no-deps --prefer-binary --use-pep517 --no-build-isolation \
  --wheel-dir "$wheels/fetched" -r $here/hashes.txt
"$tools/bin/pip" wheel -q --no-deps --no-build-isolation --wheel-dir "$wheels" ./agent .
/usr/bin/python3 -m venv --without-pip "$venv"
"$tools/bin/pip" --python "$venv/bin/python3" install -q --no-index --no-deps "$wheels"/fetched/*.whl "$wheels"/*.whl
"$tools/bin/pip" --python "$venv/bin/python3" check
# The environment moves: only its scripts and its configuration name where it was built.
grep -rlIZ "^#!.*$venv" "$venv/bin" | xargs -0 sed -i '1s|^#!.*python.*|#!/usr/lib/pollux/bin/python3|'
sed -i '/^command/d' "$venv/pyvenv.cfg"
rm -rf "$venv/.gitignore" "$venv"/bin/[Aa]ctivate* "$venv/include" "$venv/share" "$venv/lib64"
find "$venv" -name direct_url.json -delete
# What only the tests of the libraries use: 60 MB.
find "$venv/lib" -type d \( -name tests -o -name __pycache__ \) -prune -exec rm -rf {} +
find "$venv/lib" -name '*.py' -perm /111 -exec chmod a-x {} +
find "$venv/lib" -name '*.so*' -exec chmod 644 {} +
! grep -rlI "$to" "$venv"

put() { # put PACKAGE MODE FOLDER FILE...
  install -D -m "$2" -t "$to/$1/$3" "${@:4}"
}
link() { # link PACKAGE PATH TARGET
  install -d "$(dirname "$to/$1/$2")"
  ln -sf "$3" "$to/$1/$2"
}
put pollux-runtime 644 usr/lib/pollux slurm_hooks/spank/spank_pollux.so
link pollux-runtime usr/bin/polluxctl ../lib/pollux/bin/polluxctl
link polluxd usr/bin/polluxd ../lib/pollux/bin/polluxd
put pollux-node 755 usr/bin contrib/packaging/pollux
put pollux-login 644 usr/share/pollux "$wheels"/pollux_agent-*.whl
put pollux-login 644 usr/share/doc/pollux-login/examples contrib/examples/*.py
put pollux-login 755 usr/share/doc/pollux-login/examples contrib/examples/first.sh
put polluxd 644 usr/share/doc/polluxd/examples/prometheus contrib/prometheus/*
put polluxd 644 usr/lib/systemd/system contrib/systemd/*.service contrib/systemd/*.socket
pages=$to/pages
mkdir -p "$pages"
"$venv/bin/python3" -m contrib.man.generate "$pages"
"$venv/bin/python3" -m contrib.grafana >"$pages/polluxd-prometheus.json"
put polluxd 644 usr/share/doc/polluxd/examples/grafana "$pages/polluxd-prometheus.json"
put polluxd 644 usr/share/polluxd "$pages/polluxd.toml"
install -D -m 644 contrib/systemd/polluxd.sysusers "$to/polluxd/usr/lib/sysusers.d/polluxd.conf"
put polluxd 644 usr/share/man/man8 "$pages/polluxd.8"
put polluxd 644 usr/share/man/man5 "$pages/polluxd.toml.5"
put pollux-runtime 644 usr/share/man/man1 "$pages/polluxctl.1"
put pollux-node 644 usr/share/man/man1 contrib/man/pollux.1
completion() { # completion PACKAGE PROGRAM SHELL PATH
  local file=$to/$1/usr/share/$4
  install -d "$(dirname "$file")"
  env "_${2^^}_COMPLETE=source_$3" "$venv/bin/python3" "$venv/bin/$2" >"$file"
  grep -q "$2" "$file"
}
for pair in pollux-runtime:polluxctl polluxd:polluxd; do
  completion "${pair%:*}" "${pair#*:}" bash "bash-completion/completions/${pair#*:}"
  completion "${pair%:*}" "${pair#*:}" zsh "zsh/vendor-completions/_${pair#*:}"
done
