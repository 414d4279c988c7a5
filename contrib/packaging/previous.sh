#!/bin/bash
# Builds the packages of an earlier commit, and takes its install page: dist/previous.
#
#   contrib/packaging/previous.sh [COMMIT]      (the newest tag; without tags, the first commit with packages)
set -euo pipefail

repository=$(cd "$(dirname "$0")/../.." && pwd)
cd "$repository"
commit=${1:-$(git describe --tags --abbrev=0 2>/dev/null || git log --format=%h --diff-filter=A -- contrib/packaging/debian/control)}
out=$repository/dist/previous
mkdir -p "$out"
git show "$commit:docs/administrator-guide/install.md" >"$out/install.md"
# A version that is older than every release of today's.
REF=$commit VERSION=0.1.0~previous contrib/packaging/build_deb.sh "$out"
