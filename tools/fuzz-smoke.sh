#!/usr/bin/env bash
# Fuzzes every fuzz target of the server module for a moment each (first argument, 3s without one). A crasher that it finds is left
# under the package's testdata/fuzz, where it becomes a regression test once committed.
#
# Go before 1.27 may report the end of the time as a failure: a bare "context deadline exceeded" and no failing input
# (https://go.dev/issue/75804). Such a run is made again, once. Everything else that is not a pass fails at once.
set -euo pipefail
cd "$(dirname "$0")/.."
fuzztime=${1:-3s}
output=$(mktemp)
trap 'rm -f "$output"' EXIT

fuzz() { # package, target
	go test -run '^$' -fuzz "^$2\$" -fuzztime "$fuzztime" -parallel 2 "./$1" 2>&1 | tee "$output"
}

# The time was over, and that is all there is to the failure: the line after FAIL is the error, and the next one ends the test.
only_time_was_over() { # target
	grep -A2 "^--- FAIL: $1 " "$output" | tail -n +2 | cmp -s - <(printf '    context deadline exceeded\nFAIL\n') &&
		! grep -q -e 'Failing input' -e 'panic' -e 'terminated unexpectedly' "$output"
}

count=0 again=0
while IFS=: read -r file name; do
	count=$((count + 1))
	package=$(dirname "$file")
	echo "$package $name"
	if ! fuzz "$package" "$name"; then
		only_time_was_over "$name" || exit 1
		echo "fuzz-smoke: $name failed because its time was over; once again"
		again=$((again + 1))
		fuzz "$package" "$name"
	fi
done < <(git ls-files -- '*_test.go' ':!bench' | xargs -r grep -Ho '^func Fuzz[A-Za-z0-9_]*' | sed 's/func //' | sort)
echo "fuzz-smoke: $count targets, $fuzztime each; $again were run again"
