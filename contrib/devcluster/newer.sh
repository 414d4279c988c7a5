#!/bin/bash
# Runs the Slurm tests in a Debian root of a newer suite, with its newer Slurm; the machine's own packages stay
# as they are. The root is kept and used again: about 1 GB (1.5 with pyslurm) and some minutes the first time.
#
#   contrib/devcluster/newer.sh [pytest's arguments]       as root
#   contrib/devcluster/newer.sh attack [--theme NAME ...]  the attack suite's themes that need no torch; attack-out/SUITE
#   contrib/devcluster/newer.sh sites [--seeds 1-3]        generated sites beside control runs; sites-out/SUITE
#   contrib/devcluster/newer.sh demo [--limit SECONDS]     `make demo`, with Debian's torch, in a root of its own; demo-out/SUITE
#
# Where pyslurm can be built for that Slurm (forky's), the tests of the client that uses it run there too.
#
# SUITE   Debian suite: trixie has Slurm 24.11, forky 26.05          (trixie)
# ROOT    where the Debian root lies                                 (/var/tmp/pollux-SUITE, pollux-demo-SUITE)
# MIRROR  of Debian                                                  (http://deb.debian.org/debian)
# PYSLURM "no" leaves pyslurm out: it takes a compiler, 0.5 GB and two minutes (yes)
set -euo pipefail

suite=${SUITE:-trixie}
mode=${1:-}
[ "$mode" = demo ] && name=pollux-demo-$suite || name=pollux-$suite
root=${ROOT:-/var/tmp/$name}
# shellcheck source=contrib/devcluster/debian_root.sh
. "$(dirname "$0")/debian_root.sh"
packages=(munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins slurmdbd slurm-wlm-mysql-plugin
  mariadb-server-core mariadb-client-core postgresql python3-venv lua5.1 ca-certificates procps)
# What the tests of the daemon's side import: no torch, no agent.
python_packages=(numpy scipy sqlalchemy psycopg2-binary starlette uvicorn httptools uvloop pydantic typer rich ClusterShell sdnotify
  prometheus-client jinja2 pytest pytest-timeout hypothesis)
tests=(tests/integration/test_slurm_contract.py tests/integration/test_slurm_hooks.py
  tests/integration/test_slurm_faults.py tests/integration/test_pyslurm.py tests/unit/slurm)

if [ "$mode" = demo ]; then
  # torch alone is Debian's: the environment sees the suite's packages.
  packages+=(python3-torch)
  python_packages+=(scikit-learn matplotlib)
  venv_options=(--system-site-packages)
  PYSLURM=no
fi
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
case $mode in attack | demo | sites) shift ;; esac
# The repository stands in for an installed package: polluxd asks for its own version, and jobs call `pollux`.
inside sh -c 'info=$(/venv/bin/python -c "import site; print(site.getsitepackages()[0])")/polluxd-0.dist-info
  mkdir -p "$info" && printf "Metadata-Version: 2.1\nName: polluxd\nVersion: 0\n" >"$info/METADATA"
  for program in polluxd:polluxd.cli.daemon polluxctl:polluxd.cli.ctl pollux:pollux.launcher.launch; do
    printf "#!/venv/bin/python\nimport sys\nfrom %s import main\nsys.exit(main())\n" "${program#*:}" \
      >"/venv/bin/${program%:*}" && chmod 755 "/venv/bin/${program%:*}"
  done'
if [ "$mode" = demo ]; then
  # Debian builds torch without libuv.
  inside env USE_LIBUV=0 /venv/bin/python -m contrib.demo --out "demo-out/$suite" "$@"
  exit
fi
if [ "$mode" = attack ]; then
  [ $# -gt 0 ] || set -- --theme slurm_text --theme database --theme tokens --theme shares
  inside /venv/bin/python -m contrib.attack --out "attack-out/$suite" "$@"
  exit
fi
# libmariadb 11.8.9 refuses slurmdbd's first query (error 5027, "number of columns"); that of Debian 12, 10.11, does not.
library=/opt/libmariadb
if [ ! -e "$root$library/libmariadb.so.3" ]; then
  inside bash -ec '
    cd "$(mktemp -d)" && mkdir -p lists/partial
    echo "deb $1 bookworm main" >sources.list
    get=(apt-get -q -o APT::Sandbox::User=root -o Dir::Etc::SourceList="$PWD/sources.list" -o Dir::Etc::SourceParts=- -o Dir::State::Lists="$PWD/lists")
    "${get[@]}" update && "${get[@]}" download libmariadb3/bookworm
    dpkg -x libmariadb3_*.deb unpacked
    install -D -m 644 unpacked/usr/lib/*/libmariadb.so.3 "$2/libmariadb.so.3"
  ' bash "$mirror" "$library" >>"$log" 2>&1 || fail "libmariadb3 of Debian 12"
fi
if [ "$mode" = sites ]; then
  inside sh -c 'id pollux >/dev/null 2>&1 || useradd --system pollux'
  [ $# -gt 0 ] || set -- --seeds 1-3
  inside env LD_LIBRARY_PATH="$library" /venv/bin/python -m contrib.sites --out "sites-out/$suite" "$@"
  exit
fi
[ $# -gt 0 ] || set -- "${tests[@]}"
inside env LD_LIBRARY_PATH="$library" /venv/bin/python -m pytest -q -p no:cacheprovider "$@"
