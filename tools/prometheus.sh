#!/bin/sh
# Prints the folder of prometheus and promtool.
#
# Looks in PROMBIN, in PATH and in the user's cache. When there are none, it
# unpacks the two programs of Debian's package into that cache: the package
# itself is not installed, since it would set up and start a service.
set -eu

cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/walrelay/prometheus

whole() { [ -x "$1/prometheus" ] && [ -x "$1/promtool" ]; }

unpack() {
	temp=$(mktemp -d)
	trap 'rm -rf "$temp"' EXIT
	# apt drops root to a user of its own, which has to get in.
	chmod 755 "$temp"
	mkdir "$temp/deb" && chmod 777 "$temp/deb"
	cd "$temp/deb"
	apt-get download -qq prometheus ||
		{ [ "$(id -u)" = 0 ] && apt-get update -qq && apt-get download -qq prometheus; } || return 1
	dpkg-deb -x prometheus_*.deb "$temp/root" && mkdir -p "$cache" || return 1
	# Renamed into place, so that nobody meets half a program.
	for name in promtool prometheus; do
		cp "$temp/root/usr/bin/$name" "$cache/.$name.$$" && mv -f "$cache/.$name.$$" "$cache/$name" || return 1
	done
}

if [ -n "${PROMBIN:-}" ]; then
	whole "$PROMBIN" && echo "$PROMBIN" && exit
	echo "error: PROMBIN=$PROMBIN: no prometheus and promtool in it" >&2
	exit 1
fi
if exe=$(command -v prometheus 2>/dev/null) && whole "$(dirname "$exe")"; then
	dirname "$exe" && exit
fi
whole "$cache" && echo "$cache" && exit
if command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then
	echo "unpacking Debian's prometheus into $cache, without installing it" >&2
	(unpack >&2) || true
	whole "$cache" && echo "$cache" && exit
	echo "error: no prometheus and promtool found, and apt-get does not know the package" >&2
	echo "hint: sudo apt-get update    and try again; or set PROMBIN to their folder" >&2
else
	echo "error: no prometheus and promtool found" >&2
	echo "hint: install Prometheus, or set PROMBIN to the folder of its programs" >&2
fi
exit 1
