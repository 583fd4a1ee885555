#!/usr/bin/env bash
# The tour of the README: a package index goes in, is read, survives kill -9, and comes out again as it went in.
#
#   examples/packages/tour.sh              the index of this machine (apt-cache dumpavail)
#   examples/packages/tour.sh INDEX        an index in a file
#
# It runs a server of its own in a directory of its own and deletes both. BIN may name a directory that has kvserver and
# kvctl; else they are built.
set -euo pipefail
cd "$(dirname "$0")/../.."

work=$(mktemp -d)
server=
cleanup() {
	if [ -n "$server" ]; then
		kill "$server" 2>/dev/null && wait "$server" || true
	fi
	rm -rf "$work"
}
trap cleanup EXIT

bin=${BIN:-$work}
if [ -z "${BIN:-}" ]; then
	go build -o "$bin/" ./cmd/kvserver ./cmd/kvctl
fi

# Somewhere out of the way of a server that may be running, and of what the kernel gives to others.
port=$((20000 + RANDOM % 10000))
export KVCTL_ENDPOINT=127.0.0.1:$port

say() { printf '\n==> %s\n' "$*"; }

start_server() {
	"$bin/kvserver" --data-dir "$work/data" --listen "$KVCTL_ENDPOINT" --http "127.0.0.1:$((port + 1))" >>"$work/server.log" 2>&1 &
	server=$!
	for _ in $(seq 300); do
		if "$bin/kvctl" health --timeout 1s >/dev/null 2>&1; then return; fi
		if ! kill -0 "$server" 2>/dev/null; then break; fi
		sleep 0.1
	done
	echo "the server did not start:" >&2
	cat "$work/server.log" >&2
	exit 1
}

say "start a server on an empty directory"
start_server

say "turn the package index into records"
if [ $# -gt 0 ]; then cat "$1"; else apt-cache dumpavail; fi | go run ./examples/packages >"$work/packages.jsonl"
echo "$(wc -l <"$work/packages.jsonl") packages"

say "import them"
"$bin/kvctl" import "$work/packages.jsonl"

say "read one by its key"
key=$("$bin/kvctl" scan --keys-only --limit 1 -o raw)
"$bin/kvctl" get "$key" | awk 'NR <= 3' # reads to the end: under pipefail, head would end the script

say "scan a prefix: every version of ${key%%/*}"
"$bin/kvctl" scan "${key%%/*}/" --keys-only -o table

say "kill -9 the server, and start it again"
{
	kill -9 "$server"
	wait "$server" || true
} 2>/dev/null # where bash reports the death
start_server
"$bin/kvctl" status -o table | grep -E '^(epochs|recovery)'

say "export everything, and compare with what went in"
"$bin/kvctl" export --file "$work/export.jsonl"
cmp "$work/packages.jsonl" "$work/export.jsonl"
echo "equal: $(wc -c <"$work/export.jsonl") bytes"
