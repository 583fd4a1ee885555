#!/usr/bin/env bash
# Fuzzes every fuzz target of the server module for a moment each (first argument, 3s). A crasher that it finds is left
# under the package's testdata/fuzz, where it becomes a regression test once committed.
set -euo pipefail
cd "$(dirname "$0")/.."
fuzztime=${1:-3s}

count=0
while IFS=: read -r file name; do
	count=$((count + 1))
	echo "$(dirname "$file") $name"
	go test -run '^$' -fuzz "^${name}\$" -fuzztime "$fuzztime" -parallel 2 "./$(dirname "$file")"
done < <(git ls-files -- '*_test.go' ':!bench' | xargs -r grep -Ho '^func Fuzz[A-Za-z0-9_]*' | sed 's/func //' | sort)
echo "fuzz-smoke: $count targets, $fuzztime each"
