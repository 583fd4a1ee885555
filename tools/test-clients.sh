#!/usr/bin/env bash
# Drives bin/kvserver from clients of other languages: the tests in Python, and the examples in Node, Java and Rust, which count
# while the server is killed under them, in plain text and over mutual TLS; the view in SQLite, whose test kills both sides; and
# openssl, which looks at the handshake. Packages come from the package
# index of each language, and stay under .cache or, for Go, in its module cache.
# CLIENTS names the ones to run; a client whose tools are missing is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."

clients=${CLIENTS:-python node java rust sqlite openssl}
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
	local tls=()
	if [[ -n ${TLS_DIR:-} ]]; then
		tls=(--tls-cert "$TLS_DIR/server.crt" --tls-key "$TLS_DIR/server.key" --tls-client-ca "$TLS_DIR/ca.crt" --tls-client-auth require)
	fi
	bin/kvserver --data-dir "$work/data" --listen "$ENDPOINT" --http "" --memory 256MiB "${tls[@]}" >>"$work/log" 2>&1 &
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
	stop
}

stop() {
	kill -TERM "$server"
	wait "$server"
	server=
}

# Once in plain text, and then a third of it over mutual TLS.
count_both_ways() {
	count_under_kills "$@"
	TLS_DIR=$work/tls COUNT=$((COUNT / 3)) count_under_kills "$@"
}

# What openssl sees of a handshake: version, ALPN and the chain; and that a client without a certificate, or of TLS 1.2, gets none.
look_at_handshakes() {
	local connect=(openssl s_client -connect "$ENDPOINT" -CAfile "$work/tls/ca.crt" -verify_return_error -verify_ip 127.0.0.1 -alpn h2)
	local mine=(-cert "$work/tls/client.crt" -key "$work/tls/client.key")
	TLS_DIR=$work/tls start
	timeout 10 "${connect[@]}" "${mine[@]}" </dev/null >"$work/good" 2>&1 || true
	for want in 'TLSv1.3' 'ALPN protocol: h2' 'Verification: OK' 'Acceptable client certificate CA names'; do
		grep -q "$want" "$work/good" || { cat "$work/good" >&2; echo "test-clients: openssl did not say: $want" >&2; exit 1; }
	done
	if timeout 10 "${connect[@]}" "${mine[@]}" -tls1_2 </dev/null >"$work/old" 2>&1 || ! grep -q 'protocol version' "$work/old"; then
		cat "$work/old" >&2; echo "test-clients: TLS 1.2 was not refused" >&2; exit 1
	fi
	{ sleep 1; } | timeout 10 "${connect[@]}" >"$work/none" 2>&1 || true
	grep -q 'certificate required' "$work/none" || { cat "$work/none" >&2; echo "test-clients: a client without a certificate was not refused" >&2; exit 1; }
	stop
	rm -rf "$work/data"
}

ENDPOINT=127.0.0.1:$((20000 + RANDOM % 10000))
export ENDPOINT COUNT=${COUNT:-3000}
bin/kvctl tls init "$work/tls" >/dev/null
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
		NODE_PATH=.cache/node/node_modules count_both_ways node examples/node/exactly_once.js
		;;
	java)
		need java mvn
		mvn --quiet --batch-mode -f examples/java/pom.xml compile
		mvn --quiet --batch-mode -f examples/java/pom.xml dependency:build-classpath -Dmdep.outputFile="$PWD/.cache/java/classpath"
		count_both_ways java -cp ".cache/java/classes:$(cat .cache/java/classpath)" ExactlyOnce
		;;
	rust)
		need cargo
		CARGO_TARGET_DIR=$PWD/.cache/rust cargo build --quiet --release --locked --manifest-path examples/rust/Cargo.toml
		COUNT=$((COUNT * 4)) count_both_ways .cache/rust/release/epochkv-exactly-once
		;;
	sqlite)
		need go
		go test -C examples/sqliteview -count=1 ./...
		;;
	openssl)
		need openssl
		look_at_handshakes
		;;
	*)
		echo "test-clients: unknown client $client; expected python, node, java, rust, sqlite or openssl" >&2
		exit 1
		;;
	esac
done
