#!/usr/bin/env bash
# Opens the console of bin/kvserver in a headless Chromium, at three widths, light and dark, by keyboard, and under axe.
# CHROMIUM names the browser; SCREENSHOTS a directory for pictures of all pages. The driver comes from the npm registry and stays under .cache.
set -euo pipefail
cd "$(dirname "$0")/.."

browser=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)}
[[ -n $browser ]] || { echo "test-console: no Chromium; install one (Debian: chromium), or name it with CHROMIUM=" >&2; exit 1; }
for tool in node npm; do
	command -v "$tool" >/dev/null || { echo "test-console: $tool is missing" >&2; exit 1; }
done
mkdir -p .cache/console
cp tools/console/package.json tools/console/test.mjs .cache/console/
(cd .cache/console && npm install --silent --no-audit --no-fund)

work=$(mktemp -d)
server=
cleanup() {
	[[ -z $server ]] || { kill -9 "$server" && wait "$server"; } 2>/dev/null || true
	rm -rf "$work"
}
trap cleanup EXIT

rpc=127.0.0.1:17460 http=127.0.0.1:17461
bin/kvserver --data-dir "$work/data" --listen "$rpc" --http "$http" --memory 256MiB --retention 1h >"$work/log" 2>&1 &
server=$!
for _ in $(seq 100); do
	(exec 3<>"/dev/tcp/${http%:*}/${http#*:}") 2>/dev/null && break
	sleep 0.1
done
for i in $(seq 40); do
	printf '{"key":"user/%d","value":"value %d"}\n' "$i" "$i"
done | bin/kvctl --endpoint "$rpc" import --bulk=never - 2>/dev/null
bin/kvctl --endpoint "$rpc" put user/1 newer >/dev/null
node .cache/console/test.mjs "http://$http/" "$browser" ${SCREENSHOTS:+"$SCREENSHOTS"}
