#!/usr/bin/env bash
# Drives bin/kvserver from clients of other languages: the tests in Python, and the examples in Node, Java and Rust, which count
# while the server is killed under them, in plain text and over mutual TLS; the view in SQLite, whose test kills both sides; a tour in
# Ruby; curl; grpcurl, which knows the server by reflection, also with tokens; ghz, which loads it; and openssl, which looks at the handshake. Packages
# come from the package index of each language, and stay under .cache or, for Go, in its module cache. Those of Ruby are Debian's:
# ruby-grpc, ruby-grpc-tools and libprotobuf-dev. The tour in Ruby, curl, grpcurl and ghz meet both transports.
# CLIENTS names the ones to run; a client whose tools are missing is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."

clients=${CLIENTS:-python node java rust ruby sqlite curl grpcurl ghz openssl}
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
	bin/kvserver --data-dir "$work/data" --listen "$ENDPOINT" --http "" --memory 256MiB --transport "${TRANSPORT:-direct}" "${tls[@]}" >>"$work/log" 2>&1 &
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

fail() {
	echo "test-clients: $*" >&2
	exit 1
}

# A client meets a new server of each transport.
on_both_transports() {
	for TRANSPORT in direct grpc-go; do
		rm -rf "$work/data"
		start
		"$@"
		stop
	done
	rm -rf "$work/data"
	TRANSPORT=direct
}

# A tool of the Go module proxy, built into .cache.
go_tool() {
	local program=$PWD/.cache/go/$1-$3
	if [[ ! -x $program ]]; then
		GOBIN=$PWD/.cache/go/bin go install "$2@$3" >&2
		mv ".cache/go/bin/$1" "$program"
	fi
	echo "$program"
}

ruby_tour() { timeout 120 ruby -I .cache/ruby test/ruby/tour.rb "$ENDPOINT"; }

# One request in bytes: the key k is put and read. What is no gRPC is refused by HTTP.
curl_requests() {
	local grpc=(timeout 20 curl --silent --show-error --http2-prior-knowledge -H 'content-type: application/grpc' -H 'te: trailers')
	printf '\0\0\0\0\6\n\1k\22\1v' | "${grpc[@]}" --data-binary @- -D "$work/head" -o "$work/body" "http://$ENDPOINT/epochkv.v1.KVService/Put"
	grep -qi '^grpc-status: 0' "$work/head" || fail "curl: a put ended with $(cat "$work/head")"
	printf '\0\0\0\0\3\n\1k' | "${grpc[@]}" --data-binary @- -D "$work/head" -o "$work/body" "http://$ENDPOINT/epochkv.v1.KVService/Get"
	grep -qi '^grpc-status: 0' "$work/head" && grep -qa v "$work/body" || fail "curl: a get ended with $(cat "$work/head")"
	printf '\0\0\0\0\0' | "${grpc[@]}" --data-binary @- -D "$work/head" -o "$work/body" "http://$ENDPOINT/epochkv.v1.KVService/Put"
	grep -qi '^grpc-status: 3' "$work/head" || fail "curl: a put without a key ended with $(cat "$work/head")"
	# Without a body: the answer may come before it, and curl takes the reset that follows such an answer for an error.
	"${grpc[@]}" -X POST -D "$work/head" -o "$work/body" "http://$ENDPOINT/epochkv.v1.KVService/None"
	grep -qi '^grpc-status: 12' "$work/head" || fail "curl: an unknown method ended with $(cat "$work/head")"
	[[ $(timeout 20 curl --silent --http2-prior-knowledge -o "$work/body" -w '%{http_code}' "http://$ENDPOINT/") == 415 ]] || fail "curl: GET / was not refused"
}

# Whether a line of the input has a text. It reads to the end: what writes into a closed pipe fails, and the pipe with it.
has() { grep -- "$1" >/dev/null; }

# Requests by reflection: unary ones, both directions of streams, and an error with its details.
grpcurl_requests() {
	local call=(timeout 20 "$grpcurl" -plaintext)
	"${call[@]}" "$ENDPOINT" list | has '^epochkv.v1.KVService$' || fail "grpcurl: no reflection"
	"${call[@]}" -d '{"key":"aw==","value":"dg=="}' "$ENDPOINT" epochkv.v1.KVService/Put | has epoch || fail "grpcurl: put"
	"${call[@]}" -d '{}' "$ENDPOINT" epochkv.v1.KVService/Scan | has '"dg=="' || fail "grpcurl: scan"
	"${call[@]}" -d '{"id":1,"put":{"key":"bA==","value":"dg=="}} {"id":2,"get":{"key":"bA=="}}' "$ENDPOINT" epochkv.v1.KVService/Pipeline | has '"dg=="' || fail "grpcurl: pipeline"
	"${call[@]}" -d '{"begin":{}} {"get":{"key":"aw=="}} {"commit":{}}' "$ENDPOINT" epochkv.v1.TransactionService/Transact | has '"dg=="' || fail "grpcurl: transaction"
	if "${call[@]}" -d '{}' "$ENDPOINT" epochkv.v1.KVService/Put >"$work/error" 2>&1 || ! grep -q KEY_EMPTY "$work/error"; then fail "grpcurl: no reason: $(cat "$work/error")"; fi
	if "${call[@]}" -max-time 0.5 -d '{"create":{"ranges":[{}]}}' "$ENDPOINT" epochkv.v1.FeedService/Watch >"$work/error" 2>&1; then
		: # grpcurl closes its side, with which the watch ends
	fi
	"${call[@]}" "$ENDPOINT" grpc.health.v1.Health/Check | has SERVING || fail "grpcurl: health"
}

# The first administrator, a role, a user and its token, all by reflection; and what the token permits. Leaves users checked.
grpcurl_tokens() {
	local call=(timeout 20 "$grpcurl" -plaintext) auth=epochkv.v1.AuthService once root token
	"${call[@]}" "$ENDPOINT" grpc.health.v1.Health/Check | has SERVING || fail "grpcurl: health" # it has logged the token before
	once=$(sed -n 's/.*bootstrap_token=\([^ ]*\).*/\1/p' "$work/log" | tail -1)
	"${call[@]}" -d "{\"token\":\"$once\",\"user\":\"ann\",\"password\":\"ann-password\"}" "$ENDPOINT" $auth/Bootstrap >/dev/null || fail "grpcurl: bootstrap"
	root=$("${call[@]}" -d '{"user":"ann","password":"ann-password"}' "$ENDPOINT" $auth/Login | sed -n 's/.*"token": "\(.*\)".*/\1/p')
	local as_root=("${call[@]}" -H "authorization: Bearer $root")
	"${as_root[@]}" -d '{"role":{"name":"shop","grants":[{"start":"cy8=","end":"czA=","read":true,"write":true}]}}' "$ENDPOINT" $auth/CreateRole >/dev/null || fail "grpcurl: role"
	"${as_root[@]}" -d '{"name":"bob","roles":["shop"]}' "$ENDPOINT" $auth/CreateUser >/dev/null || fail "grpcurl: user"
	token=$("${as_root[@]}" -d '{"user":"bob"}' "$ENDPOINT" $auth/CreateToken | sed -n 's/.*"token": "\(epochkv_.*\)".*/\1/p')
	"${as_root[@]}" "$ENDPOINT" $auth/Enable >/dev/null || fail "grpcurl: enable"

	local as_bob=("${call[@]}" -H "authorization: Bearer $token")
	"${as_bob[@]}" -d '{"key":"cy8x","value":"dg=="}' "$ENDPOINT" epochkv.v1.KVService/Put | has epoch || fail "grpcurl: put with a token"
	refused PERMISSION_DENIED "${as_bob[@]}" -d '{"key":"aw=="}' "$ENDPOINT" epochkv.v1.KVService/Get
	refused PERMISSION_DENIED "${as_bob[@]}" -d '{"id":1,"get":{"key":"aw=="}}' "$ENDPOINT" epochkv.v1.KVService/Pipeline
	refused PERMISSION_DENIED "${as_bob[@]}" "$ENDPOINT" epochkv.v1.AdminService/Status
	refused UNAUTHENTICATED "${call[@]}" -d '{"key":"cy8x"}' "$ENDPOINT" epochkv.v1.KVService/Get
	refused UNAUTHENTICATED "${call[@]}" -H "authorization: Bearer ${token}x" -d '{"key":"cy8x"}' "$ENDPOINT" epochkv.v1.KVService/Get
	"${as_root[@]}" -d '{"name":"bob","disabled":true}' "$ENDPOINT" $auth/UpdateUser >/dev/null || fail "grpcurl: disable"
	refused UNAUTHENTICATED "${as_bob[@]}" -d '{"key":"cy8x"}' "$ENDPOINT" epochkv.v1.KVService/Get
}

# A command whose output must have a reason. The error of a message of a pipeline is an answer, so the exit code may be 0.
refused() {
	local reason=$1
	shift
	"$@" >"$work/error" 2>&1 || true
	grep -q "$reason" "$work/error" || fail "no $reason: ${*: -1}: $(cat "$work/error")"
}

# Load: every request of 20,000 by 50 callers on 4 connections succeeds.
ghz_load() {
	for call in '{"key":"aw==","value":"dg=="} Put' '{"key":"aw=="} Get'; do
		timeout 120 "$ghz" --insecure --call "epochkv.v1.KVService/${call##* }" -d "${call% *}" -n 20000 -c 50 --connections 4 -O json "$ENDPOINT" >"$work/ghz"
		grep -q '"OK": *20000' "$work/ghz" || fail "ghz: ${call##* }: $(grep -A5 statusCodeDistribution "$work/ghz")"
	done
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
	ruby)
		need ruby protoc grpc_ruby_plugin
		rm -rf .cache/ruby
		mkdir -p .cache/ruby
		protoc -I api/proto -I api/third_party --ruby_out=.cache/ruby --grpc_out=.cache/ruby --plugin=protoc-gen-grpc="$(command -v grpc_ruby_plugin)" api/proto/epochkv/v1/*.proto
		on_both_transports ruby_tour
		;;
	curl)
		need curl
		on_both_transports curl_requests
		;;
	grpcurl)
		need go
		grpcurl=$(go_tool grpcurl github.com/fullstorydev/grpcurl/cmd/grpcurl v1.9.3)
		on_both_transports grpcurl_requests
		on_both_transports grpcurl_tokens
		;;
	ghz)
		need go
		ghz=$(go_tool ghz github.com/bojand/ghz/cmd/ghz v0.120.0)
		on_both_transports ghz_load
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
		echo "test-clients: unknown client $client; expected python, node, java, rust, ruby, sqlite, curl, grpcurl, ghz or openssl" >&2
		exit 1
		;;
	esac
done
