#!/bin/bash
# Tries dist/bundle on a bare Debian root without network: Python with torch, numpy and scipy, and nothing else. What comes
# out lies in bench-out.
#
#   contrib/gpu/try_bundle.sh [ARGUMENTS OF run.sh]      as root, after contrib/gpu/bundle.sh
#
# ROOT  of the machine, made once   (/var/tmp/pollux-gpu-bookworm)
set -euo pipefail

suite=bookworm
root=${ROOT:-/var/tmp/pollux-gpu-$suite}
packages=(python3 python3-venv)
python_packages=(numpy scipy)
# shellcheck source=contrib/devcluster/debian_root.sh
. "$(dirname "$0")/../devcluster/debian_root.sh"
site=lib/python3.11/site-packages
if [ "${1:-}" != offline ]; then
  make_root
  # torch as it is in .venv, with what it imports, is this machine's.
  for name in torch torchgen functorch sympy mpmath networkx jinja2 markupsafe fsspec filelock typing_extensions.py; do
    [ -e "$root/venv/$site/$name" ] || cp -al "$repository/.venv/$site/$name" "$root/venv/$site/"
  done
  echo "/venv/$site" >"$root/usr/lib/python3/dist-packages/torch.pth"
  exec unshare --net --mount "$0" offline "$@"
fi
ip link set lo up
# slurmctld finds no address to listen on where 127.0.0.1 is the only one (AI_ADDRCONFIG).
ip addr add 127.0.0.2/8 dev lo
out=$repository/bench-out bundle=$repository/dist/bundle
mkdir -p "$out"
# What run.sh installs goes with this layer: the machine is bare at each try.
mount -t tmpfs none /mnt
mkdir /mnt/{upper,work,root}
mount -t overlay overlay -o "lowerdir=$root,upperdir=/mnt/upper,workdir=/mnt/work" /mnt/root
root=/mnt/root repository=$out
cp -r "$bundle" "$root/"
inside bash /bundle/run.sh "${@:2}"
