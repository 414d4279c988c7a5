#!/bin/bash
# Builds pyslurm for the Slurm of a Debian root; newer.sh runs it in there. Exit status 3: there is none for this Slurm.
#
# PyPI has pyslurm only for Slurm 25.11, as source. Debian has Slurm 26.05. Its headers and library differ little for
# pyslurm: job ids became structures (the headers' own compatibility layer takes numbers), two names changed, and
# struct job_resources, which no header shows, has one more pointer behind its bitmap of nodes.
set -euo pipefail

release=25.11.2
slurm=$(slurmctld -V | grep -oE "[0-9]+\.[0-9]+" | head -n 1)
flags=-O0
case $slurm in
  25.11) ;;
  26.05)
    flags+=" -w -DSLURM_BACKWARD_COMPAT -Dslurm_free_ctl_conf=slurm_free_conf"
    flags+=" -DESLURM_ERROR_ON_DESC_TO_RECORD_COPY=ESLURM_MAX_JOB_COUNT"
    ;;
  *) exit 3 ;;
esac

# Start no service. Go on with an old package list: the packages may still be there.
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
chmod 755 /usr/sbin/policy-rc.d
apt-get update -q || true
DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends libslurm-dev gcc libc6-dev python3-dev

/venv/bin/pip install -q Cython==3.2.9 setuptools==84.2.1 packaging==26.3
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
cd "$build"
/venv/bin/pip download -q --no-deps --no-build-isolation --no-binary pyslurm "pyslurm==$release"
tar xzf "pyslurm-$release.tar.gz" --strip-components 1
if [ "$slurm" != 25.11 ]; then
  # The version is what setup.py compares with the headers, and polluxd with scontrol.
  sed -i "s/^__version__ = .*/__version__ = \"$slurm.${release##*.}\"/" pyslurm/version.py
  sed -i '/^ctypedef struct job_resources:/,/whole_node/ s/^\( *\)bitstr_t \*node_bitmap$/&\n\1void *added_in_26_05/' \
    pyslurm/slurm/extra.pxi
  grep -q added_in_26_05 pyslurm/slurm/extra.pxi
fi
export CFLAGS=$flags SLURM_LIB_DIR=/usr/lib/x86_64-linux-gnu/slurm-wlm
/venv/bin/pip install -q --no-deps --no-build-isolation .
