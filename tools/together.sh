#!/usr/bin/env bash
# Runs commands at the same time, each an argument for the shell, and prints the output of each when all before it have printed
# theirs. Fails if one of them fails, after all have ended.
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
bash -euo pipefail -c "$1" || failed=1 # the first prints as it goes
for n in "${!running[@]}"; do
	wait "${running[n]}" || failed=1
	cat "$outputs/$n"
done
exit "$failed"
