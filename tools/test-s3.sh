#!/usr/bin/env bash
# Drives bin/kvserver and bin/kvctl against a real server of the S3 protocol, Versity's gateway, on loopback: backups, log archive and
# restores, also while one of the two is killed; and the tests of package objectstore, which hold for directories, too.
# VERSITYGW names the program; else it is taken from the path, or built from the Go module proxy into .cache.
set -euo pipefail
cd "$(dirname "$0")/.."

version=v1.8.0
gateway=${VERSITYGW:-$(command -v versitygw || true)}
if [[ -z $gateway ]]; then
	gateway=$PWD/.cache/s3/versitygw-$version
	if [[ ! -x $gateway ]]; then
		echo "test-s3: building versitygw $version, which takes minutes"
		GOBIN=$PWD/.cache/s3/bin go install "github.com/versity/versitygw/cmd/versitygw@$version"
		mv .cache/s3/bin/versitygw "$gateway"
	fi
fi

work=$(mktemp -d)
server=
cleanup() {
	[[ -z $server ]] || { kill -9 "$server" && wait "$server"; } 2>/dev/null || true
	rm -rf "$work"
}
trap cleanup EXIT

mkdir -p "$work/root/epochkv-test"
endpoint=127.0.0.1:$((20000 + RANDOM % 10000))
export AWS_ACCESS_KEY_ID=epochkv AWS_SECRET_ACCESS_KEY=secret12
ROOT_ACCESS_KEY=$AWS_ACCESS_KEY_ID ROOT_SECRET_KEY=$AWS_SECRET_ACCESS_KEY "$gateway" --port "$endpoint" --quiet posix "$work/root" >"$work/log" 2>&1 &
server=$!
for _ in $(seq 200); do
	(exec 3<>"/dev/tcp/${endpoint%:*}/${endpoint#*:}") 2>/dev/null && break
	kill -0 "$server" 2>/dev/null || { cat "$work/log" >&2; echo "test-s3: the S3 server did not start" >&2; exit 1; }
	sleep 0.05
done
EPOCHKV_TEST_S3_ENDPOINT=http://$endpoint go test -count=1 -timeout 2m ./internal/objectstore
go test -count=1 -timeout 8m ./internal/e2e/clients -run '^TestS3' -s3.gateway "$gateway" -v
