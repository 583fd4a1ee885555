#!/usr/bin/env bash
# Opens the console of bin/kvserver in a headless Chromium, at three widths, light and dark, by keyboard, and under axe.
# Then an idle server has the console open, and may take 1 % of a core.
# CHROMIUM names the browser; SCREENSHOTS a directory for pictures of all pages. The driver comes from the npm registry and stays under .cache.
set -euo pipefail
cd "$(dirname "$0")/.."

browser=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)}
[[ -n $browser ]] || { echo "test-console: no Chromium; install one (Debian: chromium), or name it with CHROMIUM=" >&2; exit 1; }
for tool in node npm; do
	command -v "$tool" >/dev/null || { echo "test-console: $tool is missing" >&2; exit 1; }
done
mkdir -p .cache/console
cp tools/console/package.json tools/console/*.mjs .cache/console/
(cd .cache/console && npm install --silent --no-audit --no-fund)

work=$(mktemp -d)
server= locker= idle= viewer=
cleanup() {
	for process in $locker $server $viewer $idle; do
		{ kill -9 "$process" && wait "$process"; } 2>/dev/null || true
	done
	rm -rf "$work"
}
trap cleanup EXIT

rpc=127.0.0.1:17460 http=127.0.0.1:17461
bin/kvserver --data-dir "$work/data" --listen "$rpc" --http "$http" --memory 256MiB --retention 1h --console full \
	--archive "$work/archive" --archive-interval 1s --slow-request-threshold 100us >"$work/log" 2>&1 &
server=$!
for _ in $(seq 100); do
	(exec 3<>"/dev/tcp/${http%:*}/${http#*:}") 2>/dev/null && break
	sleep 0.1
done
kvctl() { HOME=$work XDG_CONFIG_HOME=$work bin/kvctl --endpoint "$rpc" "$@"; }
for i in $(seq 40); do
	printf '{"key":"user/%d","value":"value %d"}\n' "$i" "$i"
done | kvctl import --bulk=never - 2>/dev/null
kvctl put user/1 newer >/dev/null
lease=$(kvctl lease grant 1h --owner worker)
kvctl put --lease "$lease" leased key >/dev/null
kvctl lock --ttl 1h --value holder job -- sleep 600 >/dev/null 2>&1 &
locker=$!
bootstrap=$(sed -n 's/.*bootstrap_token=\([^ ]*\).*/\1/p' "$work/log" | head -1)
printf '%s\nann-password\n' "$bootstrap" | kvctl user bootstrap ann >/dev/null
KVCTL_TOKEN=$(printf 'ann-password\n' | kvctl login ann --print)
export KVCTL_TOKEN
kvctl role create reader --grant r:user/ >/dev/null
printf 'bob-password\n' | kvctl user create bob --role reader >/dev/null
node .cache/console/test.mjs "http://$http/" "$browser" "$lease" ${SCREENSHOTS:+"$SCREENSHOTS"}

# Processor time counts, and not time, so that other programs change little. A checkpoint or a probe may fall into one period: the best of three counts.
ticks() { awk '{print $14 + $15}' "/proc/$idle/stat"; }
bin/kvserver --data-dir "$work/idle" --listen 127.0.0.1:17462 --http 127.0.0.1:17463 --memory 256MiB >"$work/idle.log" 2>&1 &
idle=$!
until (exec 3<>/dev/tcp/127.0.0.1/17463) 2>/dev/null; do
	kill -0 "$idle" || { cat "$work/idle.log" >&2; exit 1; }
	sleep 0.1
done
node .cache/console/idle.mjs http://127.0.0.1:17463/ "$browser" >"$work/viewer" &
viewer=$!
for _ in $(seq 300); do
	grep -q open "$work/viewer" && break
	sleep 0.1
done
grep -q open "$work/viewer" || { echo "test-console: the console of the idle server did not open" >&2; exit 1; }
best=100000 period=30 per_second=$(getconf CLK_TCK)
for _ in 1 2 3; do
	before=$(ticks)
	sleep "$period"
	used=$(($(ticks) - before))
	((used < best)) && best=$used
	((best * 100 <= period * per_second)) && break
done
awk -v used="$best" -v all="$((period * per_second))" 'BEGIN {printf "an idle server with the console open: %.2f %% of a core\n", 100 * used / all; exit used * 100 > all}'
