#!/bin/bash
# Makes a folder with all that `make gpu-loop` needs and a machine without network lacks: Debian's Slurm, munge and
# PostgreSQL with their libraries, Python packages, this tree. What torch brings to a machine it has to have: torch, numpy
# and scipy.
#
#   contrib/gpu/bundle.sh [FOLDER]      (dist/bundle)
#
# PYTHONS  versions of Python that the machine may have   (3.11 3.12)
set -euo pipefail

repository=$(cd "$(dirname "$0")/../.." && pwd)
out=${1:-$repository/dist/bundle}
python=$repository/.venv/bin/python
work=$(mktemp -d /tmp/pollux-bundle.XXXXXX)
trap 'rm -rf "$work"' EXIT
rm -rf "$out"
mkdir -p "$out" "$work"/{debs,root,libs,site,wheels}
cd "$repository"

# All that Debian would install on an empty machine, less what every machine has and what the run does not use.
wanted=(munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins postgresql-15)
: >"$work/status"
apt-get -s --no-install-recommends -o Dir::State::status="$work/status" install "${wanted[@]}" |
  awk '/^Inst/ { print $2 }' >"$work/closure"
grep -vxE 'libllvm.*|libz3-.*|.*perl.*|locales|libc6|libc-.*|dpkg|openssl|passwd|tar|adduser|debconf|ucf|usrmerge|.*-common' \
  "$work/closure" >"$work/packages"
(cd "$work/debs" && xargs apt-get -qq -o APT::Sandbox::User=root download <"$work/packages" >/dev/null)
for package in "$work"/debs/*.deb; do dpkg-deb -x "$package" "$work/root"; done
cd "$work/root"
cp -a lib/. usr/lib/
rm -rf lib etc var run usr/share/{doc,man,info,locale,lintian,bash-completion} usr/lib/postgresql/*/lib/bitcode
# The names that Debian's alternatives give to Slurm's programs.
for program in usr/{s,}bin/*-wlm; do [ -e "${program%-wlm}" ] || ln -s "$(basename "$program")" "${program%-wlm}"; done
# Libraries by the names under which programs ask for them: a machine takes those that it has not.
cd usr/lib/x86_64-linux-gnu
find . -maxdepth 1 -type l -name 'lib*.so*' -printf '%f %l\n' | sort >"$work/links"
for library in lib*.so*; do
  grep -q " $library\$" "$work/links" || cp -L "$library" "$work/libs/"
done
rm -f lib*.so*
cd "$repository"

# What neither a wheel nor the machine brings is built here; it is pure Python.
"$python" -m pip wheel -qq --no-deps --no-build-isolation -w "$work/wheels" ./agent .
"$python" -m pip wheel -qq --no-deps -w "$work/wheels" -c constraints.txt sdnotify
needed=$("$python" - <<'P'
import tomllib
own = ("numpy", "scipy", "pollux-agent")
print(*(d for d in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"] if not d.startswith(own)))
P
)
for version in ${PYTHONS:-3.11 3.12}; do
  options=(-qq --target "$work/site/$version" --python-version "$version" --only-binary=:all: --find-links "$work/wheels" -c constraints.txt)
  for platform in 2_28 2_27 2_24 2_17; do options+=(--platform "manylinux_${platform}_x86_64"); done
  # shellcheck disable=SC2086 # a word for each requirement
  "$python" -m pip install "${options[@]}" --platform manylinux1_x86_64 --platform manylinux2014_x86_64 $needed
  "$python" -m pip install "${options[@]}" --no-deps polluxd pollux-agent
  [ -d "$work/site/$version/polluxd" ] || { echo "bundle.sh: no Python packages for Python $version" >&2; exit 1; }
  rm -rf "$work/site/$version/bin"
  find "$work/site/$version" -name __pycache__ -prune -exec rm -rf {} +
done

# What two versions have alike lies in the archive once.
first=$(ls "$work/site" | head -n 1)
(cd "$work/site" && find ./*/ -type f -printf '%P\n' | sort -u | while read -r file; do
  for version in */; do
    [ "$version" = "$first/" ] || ! cmp -s "$first/$file" "$version$file" || ln -f "$first/$file" "$version$file"
  done
done)

"$python" -c 'from contrib.commit import COMMIT; print(COMMIT)' >"$work/commit"
git ls-files agent contrib polluxd slurm_hooks sql tests/benchmarks pyproject.toml |
  tar -cf "$work/tree.tar" --transform 's,^,tree/,' --owner=0 --group=0 -T -
tar -rf "$work/tree.tar" --transform 's,^,tree/,' -C "$work" commit
tar -cf "$work/programs.tar" --owner=0 --group=0 -C "$work/root" usr
tar -cf "$work/libraries.tar" --owner=0 --group=0 -C "$work" libs
tar -cf "$work/python.tar" --owner=0 --group=0 --sort=name -C "$work" site
for part in programs libraries python tree; do xz -T0 -6 -c "$work/$part.tar" >"$out/$part.tar.xz"; done
cp contrib/gpu/run.sh "$out/"
bytes=$(du -sb "$out" | cut -f 1)
echo "  $out: $(numfmt --to=iec "$bytes"); on the machine, as root: bash bundle/run.sh"
[ "$bytes" -le $((60 << 20)) ] || { echo "bundle.sh: expected at most 60 MiB" >&2; exit 1; }
