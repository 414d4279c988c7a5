#!/bin/bash
# Writes hashes.txt and hashes-build.txt: what lay_out.sh installs, and what it builds with, each version of constraints.txt
# with the hashes of its source and of its wheels for Linux on x86_64 and aarch64; elsewhere pip builds from the source. Run
# it after a change of constraints.txt or of a dependency.
#
#   contrib/packaging/hashes.sh
set -euo pipefail

cd "$(dirname "$0")/../.."
work=$(mktemp -d /tmp/pollux-hashes.XXXXXX)
trap 'rm -rf "$work"' EXIT
/usr/bin/python3 -m venv "$work"
"$work/bin/pip" install -q uv
write() { # write FILE, with requirements on standard input
  "$work/bin/uv" pip compile -q --universal --python-version 3.11 -c constraints.txt -o "$work/pylock.toml" -
  "$work/bin/python" - "$work/pylock.toml" >"contrib/packaging/$1" <<'END'
import re, sys, tomllib

ours = re.compile(r"-none-any\.whl$|-(cp31[1-9]-cp31\d|cp\d+-abi3)-manylinux\w*(x86_64|aarch64)[\w.]*\.whl$")
print("# Written by contrib/packaging/hashes.sh.")
with open(sys.argv[1], "rb") as file:
    packages = tomllib.load(file)["packages"]
for package in packages:
    if package.get("marker") == "sys_platform == 'win32'":
        continue
    files = [package["sdist"]] if "sdist" in package else []
    files += [wheel for wheel in package.get("wheels", ()) if ours.search(wheel["url"])]
    found = sorted(file["hashes"]["sha256"] for file in files)
    print(" \\\n    ".join([f"{package['name']}=={package['version']}", *(f"--hash=sha256:{each}" for each in found)]))
END
}
"$work/bin/python" - <<'END' | write hashes.txt
import tomllib

for path in ("pyproject.toml", "agent/pyproject.toml"):
    with open(path, "rb") as file:
        needed = tomllib.load(file)["project"]["dependencies"]
    print("\n".join(each for each in needed if not each.startswith("pollux-agent")))
END
printf '%s\n' hatchling setuptools wheel | write hashes-build.txt
