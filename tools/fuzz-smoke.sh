#!/usr/bin/env bash
# Fuzzes every fuzz target of the server module for a moment each (first argument, 1s without one), two packages at a time. The test of a
# package is built once for all of its targets, which takes most of the time of a short run. A crasher that it finds is left under the
# package's testdata/fuzz, where it becomes a regression test once committed.
#
# Go before 1.27 may report the end of the time as a failure: a bare "context deadline exceeded" and no failing input
# (https://go.dev/issue/75804). Such a run is made again, once. Everything else that is not a pass fails.
set -euo pipefail
cd "$(dirname "$0")/.."

fuzz() { # target; fills $work/output. The working directory is the package's.
	"$work/test" -test.run '^$' -test.fuzz "^$1\$" -test.fuzztime "$fuzztime" -test.parallel 1 -test.fuzzcachedir "$corpus" >"$work/output" 2>&1
}

# The time was over, and that is all there is to the failure: the line after FAIL is the error, and the next one ends the test.
only_time_was_over() { # target
	grep -A2 "^--- FAIL: $1 " "$work/output" | tail -n +2 | cmp -s - <(printf '    context deadline exceeded\nFAIL\n') &&
		! grep -q -e 'Failing input' -e 'panic' -e 'terminated unexpectedly' "$work/output"
}

if [ "${1:-}" = --package ]; then # time, package
	fuzztime=$2 package=$3 failed=0
	work=$(mktemp -d)
	trap 'rm -rf "$work"' EXIT
	cd "$package"
	corpus=$(go env GOCACHE)/fuzz/$(go list .) # that of go test
	# What go test -fuzz would do, but only this package and the transport, which other packages fuzz, report what they ran: otherwise
	# all that they import would be compiled for it.
	GOGC=400 go test -c -vet=off -gcflags=-d=libfuzzer -gcflags=github.com/epochkv/epochkv/internal/transport=-d=libfuzzer -o "$work/test" .
	for name in $(grep -ho '^func Fuzz[A-Za-z0-9_]*' ./*_test.go | sed 's/^func //' | sort); do
		code=0
		fuzz "$name" || code=1
		if [ "$code" = 1 ] && only_time_was_over "$name"; then
			cat "$work/output"
			echo "fuzz-smoke: $name failed because its time was over; once again"
			code=0
			fuzz "$name" || code=1
		fi
		printf '%s %s\n%s\n' "$package" "$name" "$(cat "$work/output")"
		[ "$code" = 0 ] || failed=1
	done
	exit "$failed"
fi

fuzztime=${1:-1s}
packages=$(git grep --untracked -l '^func Fuzz' -- '*_test.go' ':!bench' | xargs -n1 dirname | sort -u)
xargs -P 2 -n 1 "$0" --package "$fuzztime" <<<"$packages"
echo "fuzz-smoke: $(git grep --untracked -h '^func Fuzz' -- '*_test.go' ':!bench' | wc -l) targets, $fuzztime each"
