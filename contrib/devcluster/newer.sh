#!/bin/bash
# Runs the Slurm tests in a Debian root of a newer suite, hence on its newer Slurm; the machine's own packages stay
# as they are. The root is kept and used again: about 1 GB (1.5 with pyslurm) and some minutes the first time.
#
#   contrib/devcluster/newer.sh [pytest's arguments]       as root
#   contrib/devcluster/newer.sh attack [--theme NAME ...]  the attack suite's themes that need no torch; attack-out/SUITE
#
# Where pyslurm can be built for that Slurm (forky's), the tests of the client that uses it run there too.
#
# SUITE   Debian suite: trixie has Slurm 24.11, forky 26.05          (trixie)
# ROOT    where the Debian root lies                                 (/var/tmp/pollux-SUITE)
# MIRROR  of Debian                                                  (http://deb.debian.org/debian)
# PYSLURM "no" leaves pyslurm out: it takes a compiler, 0.5 GB and two minutes (yes)
set -euo pipefail

suite=${SUITE:-trixie}
root=${ROOT:-/var/tmp/pollux-$suite}
# shellcheck source=contrib/devcluster/debian_root.sh
. "$(dirname "$0")/debian_root.sh"
packages=(munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins slurmdbd slurm-wlm-mysql-plugin
  mariadb-server-core mariadb-client-core postgresql python3-venv lua5.1 ca-certificates procps)
# What the tests of the daemon's side import: no torch, no agent.
python_packages=(numpy scipy sqlalchemy psycopg2-binary pydantic typer rich ClusterShell sdnotify
  prometheus-client jinja2 pytest pytest-timeout hypothesis)
tests=(tests/integration/test_slurm_contract.py tests/integration/test_slurm_hooks.py
  tests/integration/test_slurm_faults.py tests/integration/test_pyslurm.py tests/unit/slurm)

make_root
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
if [ "${1:-}" = attack ]; then
  shift
  [ $# -gt 0 ] || set -- --theme slurm_text --theme database --theme tokens --theme shares
  # polluxd asks for its own version, which an installed package has.
  inside sh -c 'info=$(/venv/bin/python -c "import site; print(site.getsitepackages()[0])")/polluxd-0.dist-info
    mkdir -p "$info" && printf "Metadata-Version: 2.1\nName: polluxd\nVersion: 0\n" >"$info/METADATA"'
  inside /venv/bin/python -m contrib.attack --out "attack-out/$suite" "$@"
  exit
fi
[ $# -gt 0 ] || set -- "${tests[@]}"
# There slurmdbd ends at its first query: its client library refuses it (libmariadb 11.8.9, error 5027).
[ "$suite" != forky ] || set -- "$@" --deselect 'tests/integration/test_slurm_contract.py::test_a_running_job_gives_nodes_back[real]'
inside /venv/bin/python -m pytest -q -p no:cacheprovider "$@"
