#!/usr/bin/env bash
# Runs commands at the same time; each argument is one, for the shell. Their outputs are not mixed: the first command prints as it goes,
# and those of the others follow in their order. If one fails, the script fails after all have ended.
set -euo pipefail
cd "$(dirname "$0")/.."

outputs=$(mktemp -d)
trap 'rm -rf "$outputs"' EXIT
running=()
for command in "${@:2}"; do
	bash -euo pipefail -c "$command" >"$outputs/${#running[@]}" 2>&1 &
	running+=($!)
done
failed=0
bash -euo pipefail -c "$1" || failed=1
for n in "${!running[@]}"; do
	wait "${running[n]}" || failed=1
	cat "$outputs/$n"
done
exit "$failed"
