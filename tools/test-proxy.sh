#!/usr/bin/env bash
# Drives the Go client and kvctl through nginx (grpc_pass) against servers of both transports: requests of each shape, large values,
# transactions, watches, deadlines, cancels, drains, and servers that are killed.
# NGINX names the program; else it is taken from the path or /usr/sbin (Debian package nginx).
set -euo pipefail
cd "$(dirname "$0")/.."

nginx=${NGINX:-$(PATH=$PATH:/usr/sbin command -v nginx || true)}
if [[ -z $nginx ]]; then
	echo "test-proxy: nginx is missing; install it, or name the program with NGINX=..." >&2
	exit 1
fi
go test -count=1 -timeout 8m ./internal/e2e/clients -run Nginx -nginx "$nginx" -v
