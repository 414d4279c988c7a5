#!/bin/bash
# Writes hashes.txt and hashes-build.txt: what lay_out.sh installs, and what it builds with, each version of constraints.txt
# with the hashes of all its files. Run it after a change of constraints.txt or of a dependency.
#
#   contrib/packaging/hashes.sh
set -euo pipefail

cd "$(dirname "$0")/../.."
work=$(mktemp -d /tmp/pollux-hashes.XXXXXX)
trap 'rm -rf "$work"' EXIT
/usr/bin/python3 -m venv "$work"
"$work/bin/pip" install -q uv
write() { # write FILE, with requirements on standard input
  "$work/bin/uv" pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
    -c constraints.txt - >"$work/found"
  { echo "# Written by contrib/packaging/hashes.sh." && cat "$work/found"; } >"contrib/packaging/$1"
}
"$work/bin/python" - <<'END' | write hashes.txt
import tomllib

for path in ("pyproject.toml", "agent/pyproject.toml"):
    with open(path, "rb") as file:
        needed = tomllib.load(file)["project"]["dependencies"]
    print("\n".join(each for each in needed if not each.startswith("pollux-agent")))
END
printf '%s\n' hatchling setuptools wheel | write hashes-build.txt
