#!/bin/bash
# Installs, upgrades and removes the RPMs with rpm's own scriptlets, in a Debian root that is thrown away: no RPM distribution, and
# no systemd runs there. As root; needs debootstrap and rpm.
#
#   contrib/packaging/rpm_test.sh [FOLDER OF PACKAGES]      (dist)
#
# ROOT    where the Debian root lies; it is removed first and at the end   (/var/tmp/pollux-rpm-test)
# SITE    a Debian root with systemd and python3 to copy                   (none: debootstrap makes one)
# MIRROR  of Debian                                                        (http://deb.debian.org/debian)
set -euo pipefail

packages=$(cd "${1:-$(dirname "$0")/../../dist}" && pwd)
root=${ROOT:-/var/tmp/pollux-rpm-test}
fail() { echo "rpm_test.sh: $1" >&2; exit 1; }
ls "$packages"/pollux-runtime-*.rpm >/dev/null || fail "no RPMs in $packages: run make rpm"
trap 'rm -rf "$root"' EXIT
rm -rf "$root"
if [ -n "${SITE:-}" ]; then
  cp -a "$SITE" "$root"
else
  . /etc/os-release
  debootstrap --variant=minbase --include=systemd-sysv,python3 "$VERSION_CODENAME" "$root" "${MIRROR:-http://deb.debian.org/debian}" >/dev/null
fi
rpm_there() { rpm --root "$root" --force-debian --nodeps "$@"; }
in_root() { chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 "$@"; }
compiled() { find "$root/usr/lib/pollux" -name '*.pyc' | grep -c . || true; }

rpm_there -i "$packages"/*.rpm
[ "$(in_root stat -c '%a %U %G' /etc/pollux/polluxd.toml)" = "640 root pollux" ] || fail "polluxd.toml has another owner or mode"
{ in_root polluxd check 2>&1 || true; } | grep -q 'configuration is sound' || fail "polluxd check" # no secret is there yet
in_root polluxctl --help >/dev/null || fail "polluxctl"
in_root test -d /run/pollux || fail "the folder of the tickets is missing"
[ "$(compiled)" -gt 1000 ] || fail "the environment is not compiled"

echo '# of the site' >>"$root/etc/pollux/polluxd.toml"
was=$(compiled)
rpm_there -U --replacepkgs "$packages"/*.rpm
[ "$(compiled)" = "$was" ] || fail "after the upgrade, $(compiled) of $was compiled files are there"
grep -q '# of the site' "$root/etc/pollux/polluxd.toml" || fail "the upgrade replaced polluxd.toml"

rpm_there -e polluxd pollux-runtime pollux-node pollux-login
left=$(find "$root/usr/lib/pollux" "$root"/usr/bin/pollux* "$root"/usr/lib/systemd/system/pollux* 2>/dev/null || true)
[ -z "$left" ] || fail "the removal left $(echo "$left" | head -5)"
[ -e "$root/etc/pollux/polluxd.toml" ] || fail "the removal took polluxd.toml"
echo "installed, installed again over themselves, and removed"
