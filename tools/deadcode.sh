#!/usr/bin/env bash
# Fails if a function is reachable from no command and no test. Generated code is its generator's business; client/ is a
# library, so what it exports is alive by definition.
set -euo pipefail
cd "$(dirname "$0")/.."

output=$(go tool -modfile=tools/go.mod deadcode -test ./...)
found=$(grep -vE '^(client/|api/)' <<<"$output" || true)
if [[ -n $found ]]; then
	printf '%s\n' "$found"
	exit 1
fi
