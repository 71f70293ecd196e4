#!/bin/sh
# Runs every fuzz target for a while: tools/fuzz.sh 5s
set -eu

for_each=${1:?how long each target runs, such as 5s}
log=$(mktemp)
trap 'rm -f "$log"' EXIT

fuzz() {
	go test -run '^$' -fuzz "^$2\$" -fuzztime "$for_each" "$1" >"$log" 2>&1
}

# A bare deadline without a failing input is a race in the tool at the end of
# -fuzztime, mended in Go 1.27: https://go.dev/issue/75804.
race() {
	grep -q 'context deadline exceeded' "$log" && ! grep -qE 'Failing input|panic:|_test\.go:' "$log"
}

grep -rHoE --include='*_test.go' '^func Fuzz[A-Za-z0-9_]*' . | sort | while IFS=: read -r file func; do
	pkg=$(dirname "$file")
	target=${func#func }
	if fuzz "$pkg" "$target" || { race && fuzz "$pkg" "$target"; }; then
		echo "ok $pkg $target: $(grep '^fuzz: ' "$log" | tail -1)"
	else
		cat "$log"
		exit 1
	fi
done
