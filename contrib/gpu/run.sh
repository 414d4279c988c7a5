#!/bin/bash
# Runs the whole loop on this machine, without network, from the bundle beside this script:
#
#   bash bundle/run.sh [--json FILE] [--page FILE]      as root; by default gpu_loop.json and gpu_loop.md here
#
# The machine has to be an x86-64 one with torch, numpy and scipy in the Python that is PYTHON (python3). Programs and libraries
# that it has stay as they are; what it lacks goes to /usr, the rest to /opt/pollux-gpu. Meant for a machine that is lent.
set -euo pipefail
umask 022

fail() { echo "run.sh: $1" >&2; exit 1; }
[ "$(id -u)" = 0 ] || fail "run it as root: slurmd starts jobs as their users"
# A mount namespace of its own: slurmd 22.05 wants the first version of cgroups, and this run needs none.
[ -n "${POLLUX_GPU_RUN:-}" ] || POLLUX_GPU_RUN=1 exec unshare --mount bash "$0" "$@"
bundle=$(cd "$(dirname "$0")" && pwd)
home=/opt/pollux-gpu
python=$(command -v "${PYTHON:-python3}") || fail "no ${PYTHON:-python3} here"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import numpy, scipy, torch' || fail "$python needs torch, numpy and scipy; PYTHON names another one"
unpacked() { # unpacked PART FOLDER OPTION...; xz itself may be missing
  "$python" -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), sys.stdout.buffer)' "$bundle/$1.tar.xz" |
    tar -x -C "$2" "${@:3}"
}

rm -rf "$home"
mkdir -p "$home" /usr/local/lib/pollux-gpu
unpacked programs / --skip-old-files --keep-directory-symlink
unpacked libraries "$home"
for library in "$home"/libs/*; do
  ldconfig -p | awk '{ print $1 }' | grep -qxF "$(basename "$library")" || cp "$library" /usr/local/lib/pollux-gpu/
done
echo /usr/local/lib/pollux-gpu >/etc/ld.so.conf.d/zz-pollux-gpu.conf
ldconfig
export PATH=$home/venv/bin:$PATH:/usr/sbin:/sbin
for program in munged slurmctld slurmd sbatch srun /usr/lib/postgresql/15/bin/postgres; do
  lacking=$(ldd "$(command -v "$program")" | grep 'not found' || true)
  [ -z "$lacking" ] || fail "$program lacks libraries: $lacking"
done
id postgres >/dev/null 2>&1 || useradd --system --home-dir /nonexistent --shell /usr/sbin/nologin postgres

unpacked python "$home"
[ -d "$home/site/$version" ] || fail "the bundle has packages for Python $(ls "$home/site" | tr '\n' ' ')and not for $version: PYTHON names another one"
unpacked tree "$home"
"$python" -m venv --without-pip "$home/venv"
packages=$("$home/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# The bundle's own first; then what the machine has.
{ echo "$home/site/$version"; echo "$home/tree"; "$python" -c 'import os, numpy, scipy, torch
print(*sorted({os.path.dirname(os.path.dirname(m.__file__)) for m in (numpy, scipy, torch)}), sep="\n")'; } >"$packages/bundle.pth"
while read -r name module; do
  printf '#!%s/venv/bin/python\nimport sys\nfrom %s import main\nsys.exit(main())\n' "$home" "$module" >"$home/venv/bin/$name"
  chmod 755 "$home/venv/bin/$name"
done <<<"pollux pollux.launcher.launch
polluxd polluxd.cli.daemon
polluxctl polluxd.cli.ctl"

mount -t tmpfs none /sys/fs/cgroup
mkdir /sys/fs/cgroup/{systemd,blkio,cpu,cpuacct,cpuset,devices,freezer,memory,pids}
here=$PWD
cd "$home/tree"
exec "$home/venv/bin/python" -m contrib.gpu --json "$here/gpu_loop.json" --page "$here/gpu_loop.md" "$@"
