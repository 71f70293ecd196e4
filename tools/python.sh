#!/bin/sh
# Prints a Python with the packages that examples/fastapi needs.
#
# It is the one of a virtual environment in the user's cache, which is made from
# PyPI when it is missing, and anew when the requirements or the Python below it
# change. PYTHON chooses that one; it has to be 3.11 or later, with venv. When there
# is none, Debian's is installed as root; anyone else is told the command.
set -eu

requirements=$(dirname "$0")/../examples/fastapi/requirements.txt
cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/walrelay

# Debian leaves ensurepip out of python3.
whole() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

found() {
	for python in python3 /usr/bin/python3; do
		if whole "$python"; then command -v "$python" && return; fi
	done
	return 1
}

install() {
	export DEBIAN_FRONTEND=noninteractive
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends python3 python3-venv
}

if [ -n "${PYTHON:-}" ]; then
	if ! whole "$PYTHON"; then
		echo "error: PYTHON=$PYTHON is no Python 3.11 or later with the modules venv and ensurepip" >&2
		exit 1
	fi
	python=$PYTHON
elif ! python=$(found); then
	if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
		echo "installing Debian's python3 and python3-venv" >&2
		install >&2
	fi
	if ! python=$(found); then
		echo "error: no Python 3.11 or later with the modules venv and ensurepip found" >&2
		echo "hint: on Debian, sudo apt-get install python3 python3-venv; or set PYTHON to another one" >&2
		exit 1
	fi
fi

key=$({ "$python" -c 'import sys; print(sys.executable, sys.version)' && cat "$requirements"; } | cksum | tr ' ' -)
dir=$cache/python-$key
if [ ! -x "$dir/bin/python" ]; then
	echo "installing the packages of examples/fastapi into $dir" >&2
	mkdir -p "$cache"
	trap 'rm -rf "$dir.$$"' EXIT
	"$python" -m venv "$dir.$$"
	"$dir.$$/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$requirements" >&2
	# Renamed into place, so that nobody meets half of it. Only bin/python, which finds its
	# packages wherever it is, may be used after that. Somebody else may have been faster.
	[ -d "$dir" ] || mv "$dir.$$" "$dir"
fi
echo "$dir/bin/python"
