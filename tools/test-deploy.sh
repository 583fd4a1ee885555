#!/usr/bin/env bash
# Checks deploy/: the manifest, the compose file, the dashboard and the Dockerfile are read as Kubernetes, docker compose, Grafana and
# BuildKit read them, which do not run; promtool tests the rules, and a real Prometheus loads them and answers every query of the
# dashboard, beside a server that is in use. PROMETHEUS and PROMTOOL name the programs; else they are taken from the path, or, on Debian and its
# relatives, unpacked from the package "prometheus" into .cache.
set -euo pipefail
cd "$(dirname "$0")/.."

prometheus=${PROMETHEUS:-$(command -v prometheus || true)}
promtool=${PROMTOOL:-$(command -v promtool || true)}
if [[ -z $prometheus || -z $promtool ]]; then
	cache=$PWD/.cache/prometheus
	if [[ ! -x $cache/usr/bin/prometheus ]]; then
		command -v apt-get >/dev/null || { echo "test-deploy: prometheus and promtool are missing; install them, or set PROMETHEUS and PROMTOOL" >&2; exit 1; }
		mkdir -p "$cache"
		(cd "$cache" && apt-get download -q prometheus && dpkg -x prometheus_*.deb .)
	fi
	prometheus=$cache/usr/bin/prometheus promtool=$cache/usr/bin/promtool
fi

go run -C tools/deploycheck . ../..
"$promtool" check rules deploy/prometheus/recording.yaml deploy/prometheus/alerts.yaml
"$promtool" test rules deploy/prometheus/rules_test.yaml
go test -count=1 ./internal/e2e/clients -run '^TestDashboardHasDataInEveryPanel$' -v -deploy.prometheus "$prometheus"
