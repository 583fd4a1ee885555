#!/usr/bin/env bash
# Fuzzes every fuzz target of the server module for a moment each (first argument, 3s without one), two targets at a time: half of the time
# of a short run is compiling and linking. A crasher that it finds is left under the package's testdata/fuzz, where it becomes a
# regression test once committed.
#
# Go before 1.27 may report the end of the time as a failure: a bare "context deadline exceeded" and no failing input
# (https://go.dev/issue/75804). Such a run is made again, once. Everything else that is not a pass fails.
set -euo pipefail
cd "$(dirname "$0")/.."

fuzz() { # package, target; fills $output
	go test -run '^$' -fuzz "^$2\$" -fuzztime "$fuzztime" -parallel 1 "./$1" >"$output" 2>&1
}

# The time was over, and that is all there is to the failure: the line after FAIL is the error, and the next one ends the test.
only_time_was_over() { # target
	grep -A2 "^--- FAIL: $1 " "$output" | tail -n +2 | cmp -s - <(printf '    context deadline exceeded\nFAIL\n') &&
		! grep -q -e 'Failing input' -e 'panic' -e 'terminated unexpectedly' "$output"
}

if [ "${1:-}" = --target ]; then # time, package, target
	fuzztime=$2 package=$3 name=$4 code=0
	output=$(mktemp)
	trap 'rm -f "$output"' EXIT
	fuzz "$package" "$name" || code=1
	if [ "$code" = 1 ] && only_time_was_over "$name"; then
		cat "$output"
		echo "fuzz-smoke: $name failed because its time was over; once again"
		code=0
		fuzz "$package" "$name" || code=1
	fi
	printf '%s %s\n%s\n' "$package" "$name" "$(cat "$output")"
	exit "$code"
fi

fuzztime=${1:-3s}
targets=$(git ls-files -- '*_test.go' ':!bench' | xargs -r grep -Ho '^func Fuzz[A-Za-z0-9_]*' | sed 's|/[^/]*:func | |' | sort)
xargs -P 2 -L 1 "$0" --target "$fuzztime" <<<"$targets"
echo "fuzz-smoke: $(wc -l <<<"$targets") targets, $fuzztime each"
