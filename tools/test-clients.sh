#!/usr/bin/env bash
# Drives bin/kvserver from clients of other languages: the tests in Python, and the examples in Node and Java, which count
# while the server is killed under them; and the view in SQLite, whose test kills both sides. Packages come from the package
# index of each language, and stay under .cache or, for Go, in its module cache.
# CLIENTS names the ones to run; a client whose tools are missing is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."

clients=${CLIENTS:-python node java sqlite}
work=$(mktemp -d)
server=
cleanup() {
	[[ -z $server ]] || kill -9 "$server" 2>/dev/null || true
	rm -rf "$work"
}
trap cleanup EXIT

need() {
	for tool in "$@"; do
		command -v "$tool" >/dev/null || { echo "test-clients: $tool is missing; install it, or choose clients with CLIENTS=\"...\"" >&2; exit 1; }
	done
}

start() {
	bin/kvserver --data-dir "$work/data" --listen "$ENDPOINT" --http "" --memory 256MiB >>"$work/log" 2>&1 &
	server=$!
	for _ in $(seq 200); do
		if (exec 3<>"/dev/tcp/${ENDPOINT%:*}/${ENDPOINT#*:}") 2>/dev/null; then return; fi
		sleep 0.05
	done
	cat "$work/log" >&2
	echo "test-clients: the server did not start" >&2
	exit 1
}

# The server is killed ten times while the client runs, at any moment of its work.
count_under_kills() {
	rm -rf "$work/data"
	start
	"$@" &
	local client=$! kills=0
	while kill -0 "$client" 2>/dev/null; do
		sleep "0.$((RANDOM % 5 + 2))"
		if ((kills < 10)); then
			kill -9 "$server"
			wait "$server" 2>/dev/null || true
			start
			kills=$((kills + 1))
		fi
	done
	wait "$client"
	echo "test-clients: the server was killed $kills times"
	kill -TERM "$server"
	wait "$server"
	server=
}

ENDPOINT=127.0.0.1:$((20000 + RANDOM % 10000))
export ENDPOINT COUNT=${COUNT:-3000}
for client in $clients; do
	echo "==> $client"
	case $client in
	python)
		need python3
		tools/test-python.sh
		;;
	node)
		need node npm
		mkdir -p .cache/node
		cp examples/node/package.json .cache/node/
		npm install --prefix .cache/node --no-audit --no-fund --silent
		NODE_PATH=.cache/node/node_modules count_under_kills node examples/node/exactly_once.js
		;;
	java)
		need java mvn
		mvn --quiet --batch-mode -f examples/java/pom.xml compile
		mvn --quiet --batch-mode -f examples/java/pom.xml dependency:build-classpath -Dmdep.outputFile="$PWD/.cache/java/classpath"
		count_under_kills java -cp ".cache/java/classes:$(cat .cache/java/classpath)" ExactlyOnce
		;;
	sqlite)
		need go
		go test -C examples/sqliteview -count=1 ./...
		;;
	*)
		echo "test-clients: unknown client $client; expected python, node, java or sqlite" >&2
		exit 1
		;;
	esac
done
