#!/bin/bash
# Runs the agent's unit tests with the oldest and the newest torch that the agent supports. Each is Debian's CPU build, in
# a Debian root of its own; the machine's own packages stay as they are. The roots are kept and used again: about 2 GB
# each, and some minutes the first time.
#
#   contrib/devcluster/torch_versions.sh [pytest's arguments]       as root
#
# SUITES  Debian suites: trixie has torch 2.6 and Python 3.13, forky torch 2.14 and Python 3.14   (trixie forky)
# ROOTS   folder for the Debian roots                                                             (/var/tmp)
# MIRROR  of Debian                                                   (http://deb.debian.org/debian)
set -euo pipefail

packages=(python3-torch python3-venv ca-certificates procps lua5.1)
# What the agent's tests import, torch aside. The environment sees the suite's torch.
python_packages=(numpy scipy typer pytest pytest-timeout hypothesis scikit-learn optuna cmaes)
status=0
for suite in ${SUITES:-trixie forky}; do
  root=${ROOTS:-/var/tmp}/pollux-torch-$suite
  # shellcheck source=contrib/devcluster/debian_root.sh
  . "$(dirname "$0")/debian_root.sh"
  venv_options=(--system-site-packages)
  make_root
  echo "  torch $(inside /venv/bin/python -c 'import platform, torch; print(torch.__version__, "on Python", platform.python_version())')"
  [ $# -gt 0 ] || set -- tests/unit/agent tests/unit/goodput
  # Debian builds torch without libuv. Each test is a process of its own: this torch's autograd starts threads, and a
  # process that has them cannot fork the ranks of another test.
  inside env USE_LIBUV=0 /venv/bin/python -m pytest -p contrib.devcluster.one_process_per_test -q -p no:cacheprovider "$@" || status=$?
done
exit $status
