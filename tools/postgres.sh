#!/bin/sh
# Prints the folder of the Postgres server programs (initdb, pg_ctl, postgres).
#
# Looks in PGBIN, PATH, pg_config and the usual install folders. When there are
# none, it installs Debian's package as root, without the cluster and service
# that the package would set up by itself; anyone else is told the command.
set -eu

whole() { [ -x "$1/initdb" ] && [ -x "$1/pg_ctl" ] && [ -x "$1/postgres" ]; }

found() {
	# PATH often has links: the folder they lead to is the whole installation.
	if exe=$(command -v postgres 2>/dev/null); then
		dir=$(dirname "$(readlink -f "$exe" 2>/dev/null || echo "$exe")")
		if whole "$dir"; then echo "$dir" && return; fi
	fi
	if dir=$(pg_config --bindir 2>/dev/null) && whole "$dir"; then echo "$dir" && return; fi
	# The highest major comes first.
	for dir in $(ls -d /usr/lib/postgresql/*/bin /usr/pgsql-*/bin /opt/homebrew/opt/postgresql@*/bin \
		/usr/local/opt/postgresql@*/bin /usr/local/pgsql/bin 2>/dev/null | sort -Vr); do
		if whole "$dir"; then echo "$dir" && return; fi
	done
	return 1
}

install() {
	export DEBIAN_FRONTEND=noninteractive
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends postgresql-common
	# The drop-in is there during the installation only: the host's own choice stays.
	dropin=/etc/postgresql-common/createcluster.d/walrelay.conf
	mkdir -p "$(dirname "$dropin")"
	trap 'rm -f "$dropin"' EXIT
	echo 'create_main_cluster = false' >"$dropin"
	apt-get install -y -qq --no-install-recommends postgresql
}

if [ -n "${PGBIN:-}" ]; then
	whole "$PGBIN" && echo "$PGBIN" && exit
	echo "error: PGBIN=$PGBIN: no initdb, pg_ctl and postgres in it" >&2
	exit 1
fi
found && exit
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
	echo "installing Debian's postgresql, without a cluster" >&2
	install >&2
	found && exit
fi
echo "error: no Postgres server programs found (initdb, pg_ctl, postgres)" >&2
if command -v apt-get >/dev/null; then
	echo "hint: sudo tools/postgres.sh    installs Debian's package without a cluster; or set PGBIN to their folder" >&2
else
	echo "hint: install PostgreSQL 14 or later, or set PGBIN to the folder of its server programs" >&2
fi
exit 1
