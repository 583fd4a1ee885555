#!/usr/bin/env bash
# Runs h2spec, the conformance tests of HTTP/2, against servers of both transports, and fails if a case fails that is not in the
# lists in tools/h2spec, which docs/testing.md explains. Beside its own requests, which are no gRPC and are answered at once, h2spec is run with
# headers of gRPC, on a stream that stays open. It is built from the Go module proxy into .cache.
set -euo pipefail
cd "$(dirname "$0")/.."

version=v2.2.1+incompatible
cache=$PWD/.cache/h2spec
if [[ ! -x $cache/h2spec || ! -x $cache/h2spec-grpc ]]; then
	rm -rf "$cache"
	mkdir -p "$cache"
	from=$(cd tools && GOFLAGS=-mod=mod go mod download -json "github.com/summerwind/h2spec@$version" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
	cp -r "$from" "$cache/source"
	chmod -R u+w "$cache/source"
	(
		cd "$cache/source"
		[[ -f go.mod ]] || go mod init github.com/summerwind/h2spec
		go mod tidy
		go build -o "$cache/h2spec" ./cmd/h2spec
		sed -i 's/HeaderField(":method", "GET")/HeaderField(":method", "POST")/
			s|^\t\tHeaderField(":authority", authority),|&\n\t\tHeaderField("content-type", "application/grpc"),\n\t\tHeaderField("te", "trailers"),|' spec/util.go
		go build -o "$cache/h2spec-grpc" ./cmd/h2spec
	) 2>"$cache/log" || { cat "$cache/log" >&2; exit 1; }
fi

work=$(mktemp -d)
server=
cleanup() {
	[[ -z $server ]] || kill -9 "$server" 2>/dev/null || true
	rm -rf "$work"
}
trap cleanup EXIT

failed=0
for transport in direct grpc-go; do
	for program in h2spec h2spec-grpc; do
		port=$((20000 + RANDOM % 10000))
		bin/kvserver --data-dir "$work/data" --listen "127.0.0.1:$port" --http "" --memory 256MiB --transport "$transport" >>"$work/log" 2>&1 &
		server=$!
		for _ in $(seq 200); do
			if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then break; fi
			sleep 0.05
		done
		"$cache/$program" -h 127.0.0.1 -p "$port" -P /epochkv.v1.KVService/Pipeline -o 2 >"$work/report" || true
		kill -9 "$server"
		wait "$server" 2>/dev/null || true
		server=
		rm -rf "$work/data"
		# Number of the section, and the case.
		sed '1,/^Failures/d' "$work/report" | sed -n 's/^ *\([0-9][0-9.]*\) .*/section \1/p; s/^ *× \(.*\)/\1/p; s/^\(Generic\|Hyper\|HPACK\).*/part \1/p' |
			awk '/^part / { part = $2; next } /^section / { section = $2; next } { print part, section, $0 }' >"$work/list"
		list=tools/h2spec/$transport${program#h2spec}.txt
		tail -n 1 "$work/report" | sed "s/^/$transport, $program: /"
		# Some cases depend on whether h2spec sends its next frame before it has the answer, so those of the list may pass.
		if more=$(LC_ALL=C comm -13 <(LC_ALL=C sort "$list") <(LC_ALL=C sort "$work/list")) && [[ -n $more ]]; then
			printf 'test-h2spec: %s, %s: these cases fail and are not in %s:\n%s\n' "$transport" "$program" "$list" "$more" >&2
			failed=1
		fi
	done
done
exit $failed
